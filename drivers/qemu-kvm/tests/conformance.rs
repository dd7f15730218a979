//! The driver contract over real QEMU.

#[cfg(test)]
#[expect(dead_code, reason = "the other tests use the rest")]
#[path = "qemu/common.rs"]
mod common;

#[cfg(test)]
#[path = "contract/bench.rs"]
mod bench;

#[cfg(test)]
use testbed::netns::in_netns;

#[test]
fn the_driver_keeps_the_contract_on_real_qemu() {
    in_netns(|| async {
        let bench = bench::Bench { bed: common::Bed::new() };
        // The directories that the driver makes once are no leak.
        drop(bench.bed.driver().await);
        let options = conformance::Options {
            drop_points: 40,
            parallel: 4,
            ..conformance::Options::default()
        };
        conformance::check_hypervisor(&bench, &options).await.assert_passed();
    });
}
