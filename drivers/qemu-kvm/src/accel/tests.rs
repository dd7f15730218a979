use super::*;
use crate::config::QemuConfig;

fn inner(dir: &Path, choice: AccelChoice, allow_tcg: bool) -> std::sync::Arc<Inner> {
    let node = "0d9e8f7a-6b5c-4d3e-8f2a-1b0c9d8e7f6a".parse().unwrap();
    let mut config = QemuConfig::new(node, "test", dir.join("state"), dir.join("run"));
    config.accel = choice;
    config.allow_tcg = allow_tcg;
    files::private_dir(&config.run_dir).unwrap();
    Inner::new(config, "QEMU test".to_owned())
}

#[tokio::test]
async fn the_probe_guest_is_what_its_source_says() {
    let dir = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/probe/probe.s");
    let (object, binary) = (dir.path().join("probe.o"), dir.path().join("probe.bin"));
    let cx = Context::new();
    let assemble = Run::new("as").arg("--32").arg("-o").arg(&object).arg(&source);
    assemble.success(&cx).await.expect("binutils are needed");
    let link = Run::new("ld").args(["-m", "elf_i386", "--oformat", "binary"]);
    let link = link.args(["-Ttext", "0xffffff00", "-o"]).arg(&binary).arg(&object);
    link.success(&cx).await.expect("binutils are needed");
    assert_eq!(std::fs::read(&binary).unwrap(), CODE);
    assert_eq!(image().len(), ROM_BYTES);
}

#[tokio::test]
async fn the_probe_guest_comes_back_under_an_accelerator_that_works() {
    let dir = tempfile::tempdir().unwrap();
    let inner = inner(dir.path(), AccelChoice::Auto, true);
    // TCG does several hundred million instructions a second, so it passes where half a million would not.
    assert!(probe(&inner, &Context::new(), "tcg").await.unwrap());
    assert_eq!(std::fs::read_dir(dir.path().join("run")).unwrap().count(), 0, "nothing is left");
}

#[tokio::test]
async fn the_answer_is_kept_for_this_boot_and_version_only() {
    let dir = tempfile::tempdir().unwrap();
    let inner = inner(dir.path(), AccelChoice::Auto, true);
    let cache = dir.path().join("run/accel.json");
    let write = |boot: &str, kvm| {
        let cached = Cached { boot: boot.to_owned(), version: "QEMU test".to_owned(), kvm };
        std::fs::write(&cache, serde_json::to_vec(&cached).unwrap()).unwrap();
    };
    write(&boot_id().unwrap(), true);
    assert!(has_real_kvm(&inner, &Context::new()).await.unwrap());
    assert_eq!(probed(&dir.path().join("run")), Some((true, "QEMU test".to_owned())));
    write("another boot", true);
    assert_eq!(probed(&dir.path().join("run")), None);
    let found = has_real_kvm(&inner, &Context::new()).await.unwrap();
    assert_eq!(load(&cache).unwrap().kvm, found);
    assert_eq!(load(&cache).unwrap().boot, boot_id().unwrap());
}

#[tokio::test]
async fn tcg_is_taken_only_where_it_is_allowed() {
    let dir = tempfile::tempdir().unwrap();
    for (allow, wanted) in [(true, Some(Accel::Tcg)), (false, None)] {
        let inner = inner(dir.path(), AccelChoice::Auto, allow);
        let cached =
            Cached { boot: boot_id().unwrap(), version: "QEMU test".to_owned(), kvm: false };
        let cache = dir.path().join("run/accel.json");
        std::fs::write(&cache, serde_json::to_vec(&cached).unwrap()).unwrap();
        let answer = decide(&inner, &Context::new()).await;
        assert_eq!(answer.as_ref().ok().copied(), wanted);
        if let Err(error) = answer {
            assert_eq!(error.kind(), ErrorKind::Unavailable);
        }
    }
}
