//! Networks and ports come, are put back, and go without a trace.

use crate::common::{Host, census, network, port};
use drivers_api::{Change, Network, NetworkType};
use testbed::netns::in_netns;

#[test]
fn every_call_is_made_twice_and_the_host_is_as_before() {
    in_netns(|| async {
        let mut host = Host::new();
        let before = census(host.dir.path());
        let (net, one, two) = (network(1, NetworkType::Nat), port(1, 1), port(1, 2));
        assert_eq!(host.network(&net).await, Change::Created);
        assert_eq!(host.network(&net).await, Change::Unchanged);
        assert_eq!(host.port(&one).await, Change::Created);
        assert_eq!(host.port(&two).await, Change::Created);
        assert_eq!(host.port(&one).await, Change::Unchanged);
        host.is_healthy(net.uuid).await.unwrap();
        host.is_port_healthy(one.uuid).await.unwrap();
        host.restart();
        let networks = host.driver.list(&host.cx).await.unwrap();
        assert_eq!(networks.len(), 1);
        assert_eq!(networks[0].spec.as_ref(), Some(&net));
        let mut ports = host.driver.list_ports(&host.cx).await.unwrap();
        ports.sort_by_key(|port| port.uuid);
        assert_eq!(
            ports.iter().map(|port| port.spec.clone().unwrap()).collect::<Vec<_>>(),
            [one.clone(), two.clone()]
        );
        assert!(ports.iter().all(|port| port.healthy && port.nic.is_some()));
        assert_eq!(host.network(&net).await, Change::Unchanged);
        assert_eq!(host.port(&one).await, Change::Unchanged);
        let error = host.driver.destroy_network(&host.cx, net.uuid).await.unwrap_err();
        assert_eq!(error.kind(), drivers_api::ErrorKind::Conflict);
        assert!(error.to_string().contains(&one.uuid.to_string()), "{error}");
        for port in [&one, &two] {
            assert_eq!(
                host.driver.detach_port(&host.cx, port.uuid).await.unwrap(),
                Change::Changed
            );
            assert_eq!(
                host.driver.detach_port(&host.cx, port.uuid).await.unwrap(),
                Change::Unchanged
            );
        }
        assert_eq!(host.driver.destroy_network(&host.cx, net.uuid).await.unwrap(), Change::Changed);
        assert_eq!(
            host.driver.destroy_network(&host.cx, net.uuid).await.unwrap(),
            Change::Unchanged
        );
        assert_eq!(census(host.dir.path()), before);
        assert_eq!(testbed::netns::Netns::current().unwrap().pids().unwrap(), Vec::<i32>::new());
        assert_eq!(host.driver.get(&host.cx, net.uuid).await.unwrap(), None);
        assert_eq!(host.driver.get_port(&host.cx, one.uuid).await.unwrap(), None);
    });
}
