//! The reference drivers pass the kit.

use conformance::{
    Options, check_hypervisor,
    reference::{Host, ReferenceBench},
};

fn bench() -> ReferenceBench {
    ReferenceBench::new(Host::new())
}

#[tokio::test]
async fn the_reference_hypervisor_passes_the_kit() {
    let bench = bench();
    check_hypervisor(&bench, &Options::default()).await.assert_complete();
    assert_eq!(bench.host().violations(), Vec::<String>::new());
}
