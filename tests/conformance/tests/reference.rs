//! The reference drivers pass the kit.

use conformance::{
    Options, check_hypervisor, check_image, check_network, check_volume,
    reference::{Host, ReferenceBench},
};

/// One test for all: the kit counts the descriptors of the process, so nothing else may run beside it.
#[tokio::test]
async fn the_reference_drivers_pass_the_kit() {
    let bench = ReferenceBench::new(Host::new());
    let options = Options::default();
    check_hypervisor(&bench, &options).await.assert_complete();
    check_image(&bench, &options).await.assert_complete();
    check_network(&bench, &options).await.assert_complete();
    check_volume(&bench, &options).await.assert_complete();
    let meshes = bench.clone().with_meshes();
    check_network(&meshes, &options).await.assert_passed();
    let bare = bench.clone().without_whole_spec();
    check_hypervisor(&bare, &options).await.assert_passed();
    assert_eq!(bench.host().violations(), Vec::<String>::new());
}
