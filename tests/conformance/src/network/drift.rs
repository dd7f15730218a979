//! Parts that somebody removed by hand.

use drivers_api::Change;

use super::Kit;
use crate::kit::{Check, expect, not_tried, same};

pub(super) async fn network(kit: &Kit<'_>) -> Check {
    let parts = kit.bench.network_parts();
    if parts.is_empty() {
        return not_tried("the bench removes no parts of networks");
    }
    for part in parts {
        let driver = kit.open().await?;
        let spec = kit.made(&*driver, 0).await?;
        kit.bench.remove_network_part(&spec, part).await.check()?;
        let seen = kit.get(&*driver, &spec).await?;
        expect(
            seen.is_none_or(|status| !status.healthy),
            format_args!("a network without {part} is called healthy"),
        )?;
        let driver = kit.open().await?;
        let change = kit.ensure(&*driver, &spec).await?;
        expect(change.wrote(), format_args!("{part}: ensure_network changed nothing"))?;
        kit.whole(&*driver, &spec).await?;
        same(part, &kit.ensure(&*driver, &spec).await?, &Change::Unchanged)?;
        let _ = kit.destroy(&*driver, &spec).await?;
    }
    Ok(())
}

pub(super) async fn port(kit: &Kit<'_>) -> Check {
    let parts = kit.bench.port_parts();
    if parts.is_empty() {
        return not_tried("the bench removes no parts of ports");
    }
    for part in parts {
        let driver = kit.open().await?;
        let network = kit.made(&*driver, 0).await?;
        let port = kit.port(&network, 0).await;
        let first = kit.attach(&*driver, &port).await?;
        kit.bench.remove_port_part(&port, part).await.check()?;
        let seen = kit.get_port(&*driver, &port).await?;
        expect(
            seen.is_none_or(|status| !status.healthy),
            format_args!("a port without {part} is called healthy"),
        )?;
        let driver = kit.open().await?;
        let again = kit.attach(&*driver, &port).await?;
        expect(again.change.wrote(), format_args!("{part}: attach_port changed nothing"))?;
        same(format_args!("{part}: the NIC"), &again.value, &first.value)?;
        kit.port_whole(&*driver, &port, &first.value).await?;
        same(part, &kit.attach(&*driver, &port).await?.change, &Change::Unchanged)?;
        let _ = kit.detach(&*driver, &port).await?;
    }
    Ok(())
}

pub(super) async fn destroy_what_is_left(kit: &Kit<'_>) -> Check {
    let (network_parts, port_parts) = (kit.bench.network_parts(), kit.bench.port_parts());
    if network_parts.is_empty() && port_parts.is_empty() {
        return not_tried("the bench removes no parts");
    }
    let before = kit.bench.census().await;
    for part in port_parts {
        let driver = kit.open().await?;
        let network = kit.made(&*driver, 0).await?;
        let port = kit.port(&network, 0).await;
        let _ = kit.attach(&*driver, &port).await?;
        kit.bench.remove_port_part(&port, part).await.check()?;
        let driver = kit.open().await?;
        let _ = kit.detach(&*driver, &port).await?;
        kit.port_gone(&*driver, &port).await?;
        let _ = kit.destroy(&*driver, &network).await?;
        kit.unwritten(&before).await?;
    }
    for part in network_parts {
        let driver = kit.open().await?;
        let network = kit.made(&*driver, 0).await?;
        kit.bench.remove_network_part(&network, part).await.check()?;
        let driver = kit.open().await?;
        let _ = kit.destroy(&*driver, &network).await?;
        kit.gone(&*driver, &network).await?;
        kit.unwritten(&before).await?;
    }
    Ok(())
}
