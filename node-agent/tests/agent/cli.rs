//! The built binary: exit codes, outputs, locks, crashes, stores that are not to be written.

use std::{os::unix::net::UnixDatagram, time::Duration};

use crate::common::{BIN, Place, run, volume};
use host::run::Run;
use serde_json::json;

const BROKEN: &str =
    "api_version: bcd/v1\nkind: Volume\nname: a\nspec:\n  size_gib: 1\n  formt: raw\n";

#[tokio::test]
async fn a_wrong_command_line_ends_with_64_and_help_with_0() {
    let place = Place::reference("");
    assert!(place.cli(&["frobnicate"]).await.expect(64).err.contains("unrecognized subcommand"));
    place.cli(&["apply"]).await.expect(64);
    place.cli(&["get", "gadget"]).await.expect(64);
    assert!(place.cli(&["--help"]).await.expect(0).out.contains("Exit codes:"));
    for command in ["run", "apply", "delete", "get", "describe", "plan", "start", "stop", "reboot"]
    {
        assert!(
            place.cli(&[command, "--help"]).await.expect(0).out.contains("Usage:"),
            "{command}"
        );
    }
    for shell in ["bash", "zsh", "fish"] {
        assert!(place.cli(&["completions", shell]).await.expect(0).out.contains("bcd-node"));
    }
}

#[tokio::test]
async fn without_an_agent_every_command_says_how_to_start_one() {
    let place = Place::reference("");
    for args in [&["get"] as &[&str], &["events"], &["drivers", "list"], &["console", "a"]] {
        let left = place.cli(args).await.expect(1);
        assert!(
            left.err.contains("no agent answers") && left.err.contains("bcd-node run"),
            "{left:?}"
        );
    }
    let left = place.cli(&["doctor", "--config", &place.text("config.toml")]).await;
    assert!(left.out.contains("nftables") && left.err.contains("no agent answers"), "{left:?}");
}

#[tokio::test]
async fn the_default_configuration_can_be_printed_and_read_and_a_wrong_one_is_refused() {
    let place = Place::reference("[qemu]\naccell = \"kvm\"");
    let printed = run(Run::new(BIN).args(["run", "--print-default-config"])).await.expect(0).out;
    assert!(printed.contains("resync_seconds = 30"));
    let left = place.cli(&["run", "--config", &place.text("config.toml")]).await.expect(1);
    assert!(left.err.contains("qemu.accell: unknown field (did you mean \"accel\"?)"), "{left:?}");
    let left = place.cli(&["run", "--config", "/nonexistent.toml"]).await.expect(1);
    assert!(left.err.contains("there is no configuration file /nonexistent.toml"), "{left:?}");
}

#[tokio::test]
async fn objects_are_planned_applied_shown_changed_and_deleted() {
    let place = Place::reference("");
    let agent = place.start().await;
    let manifest = volume("a", 1);
    let plan = place.feed(&["plan", "-f", "-"], &manifest).await.expect(2);
    assert!(
        plan.out.contains("Volume a created") && plan.out.contains("ensure-volume"),
        "{plan:?}"
    );
    assert_eq!(place.cli(&["get", "-o", "json"]).await.expect(0).json(), json!([]));

    let left = place.feed(&["apply", "-f", "-", "--wait=20"], &manifest).await.expect(0);
    assert_eq!(left.out, "Volume a created\n");
    assert!(left.err.contains("Volume a: Ready") && left.err.contains("done after"), "{left:?}");
    let plan = place.feed(&["plan", "-f", "-"], &manifest).await.expect(0);
    assert_eq!(plan.out, "nothing to do on the host\n");
    let left = place.feed(&["apply", "-f", "-", "-o", "json"], &manifest).await.expect(0).json();
    assert_eq!((&left[0]["change"], &left[0]["generation"]), (&json!("unchanged"), &json!(1)));

    let yaml = place.cli(&["get", "-o", "yaml"]).await.expect(0).out;
    assert!(yaml.starts_with("api_version: bcd/v1\nkind: Volume\nname: a\nuuid: "), "{yaml}");
    assert_eq!(
        place.feed(&["apply", "-f", "-"], &yaml).await.expect(0).out,
        "Volume a unchanged\n"
    );

    let grown = volume("a", 2);
    let plan = place.feed(&["plan", "-f", "-", "-o", "json"], &grown).await.expect(2).json();
    assert_eq!(plan["steps"][0]["action"], json!("ensure-volume"));
    place.feed(&["apply", "-f", "-", "--wait=20"], &grown).await.expect(0);
    assert_eq!(place.object("volume", "a").await["status"]["observed_generation"], json!(2));
    let table = place.cli(&["get", "volumes"]).await.expect(0).out;
    assert!(table.starts_with("NAME  PHASE  GIB  FORMAT"), "{table}");
    let described = place.cli(&["describe", "volume", "a"]).await.expect(0).out;
    assert!(
        described.contains("nothing is to be done") && described.contains("events"),
        "{described}"
    );

    let left = place.cli(&["delete", "volume", "a", "--wait=20"]).await.expect(0);
    assert_eq!(left.out, "Volume a deleting\n");
    let left = place.cli(&["delete", "volume", "a", "--wait"]).await.expect(0);
    assert_eq!(left.out, "Volume a not found, nothing to do\n");
    let left = place.cli(&["get", "volume", "a"]).await.expect(1);
    assert!(left.err.contains("cannot find Volume a"), "{left:?}");
    let events = place.cli(&["events"]).await.expect(0).out;
    assert!(
        events.contains("accepted Volume a: created") && events.contains("gone     Volume a"),
        "{events}"
    );
    let drivers =
        place.cli(&["drivers", "list", "--kind", "volume", "-o", "json"]).await.expect(0).json();
    assert_eq!(drivers[0]["id"], json!("reference"));
    place.cli(&["drivers", "list", "--kind", "gpu"]).await.expect(1);
    assert_eq!(agent.stop().await, 0);
    assert!(!place.path("s").exists(), "the socket is removed");
}

#[tokio::test]
async fn a_faulty_document_refuses_the_whole_file_with_its_place() {
    let place = Place::reference("");
    let _agent = place.start().await;
    let text = format!("{}---\n{BROKEN}", volume("good", 1));
    let left = place.feed(&["apply", "-f", "-"], &text).await.expect(1);
    let wanted =
        "document 2, line 12: Volume a: spec.formt: unknown field (did you mean \"format\"?)";
    assert!(left.err.contains(wanted), "{left:?}");
    assert_eq!(place.cli(&["get", "-o", "json"]).await.expect(0).json(), json!([]));
    let dangling = "api_version: bcd/v1\nkind: Instance\nname: a\nspec:\n  cpus: 1\n  memory_mib: 64\n  boot: {kind: oci_image, ref: nowhere}\n";
    let left = place.feed(&["apply", "-f", "-"], dangling).await.expect(1);
    assert!(left.err.contains("document 1: Instance a: spec.boot.ref"), "{left:?}");
    assert_eq!(place.cli(&["get", "-o", "json"]).await.expect(0).json(), json!([]));
    place.feed(&["plan", "-f", "-"], BROKEN).await.expect(1);
}

#[tokio::test]
async fn a_wait_that_is_not_reached_ends_with_5_and_says_why() {
    let place = Place::reference("");
    let _agent = place.start().await;
    let image =
        "api_version: bcd/v1\nkind: Image\nname: a\nspec: {ref: 'registry.test:5000/none:1'}\n";
    let left = place.feed(&["apply", "-f", "-", "--wait=2"], image).await.expect(5);
    assert!(
        left.err.contains("Image a: Retrying") && left.err.contains("not reached within 2 s"),
        "{left:?}"
    );
    // A deletion does not wait for the retry.
    place.cli(&["delete", "image", "a", "--wait=5"]).await.expect(0);
}

#[tokio::test]
async fn a_second_agent_ends_with_3_within_two_seconds_and_names_the_first() {
    let place = Place::reference("");
    let agent = place.start().await;
    let begun = tokio::time::Instant::now();
    let left = place.cli(&["run", "--config", &place.text("config.toml")]).await.expect(3);
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    assert!(left.err.contains(&format!("process {}", agent.pid())), "{left:?}");

    // Through a link, with a socket of its own.
    let link = place.path("link");
    std::os::unix::fs::symlink(place.path("state"), &link).unwrap();
    let text = std::fs::read_to_string(place.path("config.toml")).unwrap();
    let text = text.replace("/state\"", "/link\"").replace("/s\"", "/s2\"");
    std::fs::write(place.path("other.toml"), text).unwrap();
    let left = place.cli(&["run", "--config", &place.text("other.toml")]).await.expect(3);
    assert!(left.err.contains(&format!("process {}", agent.pid())), "{left:?}");
    place.cli(&["get"]).await.expect(0);

    agent.kill().await;
    let again = place.start().await;
    assert_eq!(again.stop().await, 0);
}

#[tokio::test]
async fn an_agent_whose_lock_file_is_taken_away_notices_and_stops() {
    let place = Place::reference("");
    let agent = place.start().await;
    std::fs::remove_file(place.path("state/lock")).unwrap();
    assert_eq!(agent.ended(Duration::from_secs(15)).await, 3);
    assert!(place.log().contains("another agent may have it"), "{}", place.log());
}

#[tokio::test]
async fn an_agent_that_is_killed_keeps_what_it_accepted() {
    let place = Place::reference("");
    let agent = place.start().await;
    place.feed(&["apply", "-f", "-"], &(volume("a", 1) + &volume("b", 1))).await.expect(0);
    let before = place.object("volume", "a").await["uuid"].clone();
    agent.kill().await;
    let agent = place.start().await;
    assert_eq!(place.object("volume", "a").await["uuid"], before);
    assert_eq!(
        place.cli(&["get", "-o", "json"]).await.expect(0).json().as_array().unwrap().len(),
        2
    );
    assert_eq!(agent.stop().await, 0);
}

#[tokio::test]
async fn a_crash_at_any_point_of_a_write_leaves_the_old_state_or_the_new() {
    for point in
        node_agent::store::FAULT_POINTS.iter().filter(|name| name.starts_with("store.write"))
    {
        let place = Place::reference("");
        let agent = place.start().await;
        place.feed(&["apply", "-f", "-", "--wait=20"], &volume("old", 1)).await.expect(0);
        assert_eq!(agent.stop().await, 0);
        let agent = place.start_with(&[("BCD_FAULT", &format!("{point}=kill"))]).await;
        let two = volume("new-a", 1) + &volume("new-b", 1);
        place.feed(&["apply", "-f", "-"], &two).await.expect(1);
        // The answer ends before the process does, which holds its lock until then.
        agent.died().await;
        let agent = place.start().await;
        let objects = place.cli(&["get", "-o", "json"]).await.expect(0).json();
        let names: Vec<_> =
            objects.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
        let committed = *point == "store.write.committed";
        let wanted: &[&str] = if committed { &["new-a", "new-b", "old"] } else { &["old"] };
        assert_eq!(names, wanted, "{point}");
        place.feed(&["apply", "-f", "-", "--wait=20"], &two).await.expect(0);
        assert_eq!(agent.stop().await, 0);
    }
}

#[tokio::test]
async fn a_newer_or_damaged_store_is_shown_and_never_written() {
    type Harm = fn(&Place);
    let cases: [(&str, &str, Harm); 2] = [
        ("newer", "schema 99 and this agent", |place| {
            let raw = rusqlite::Connection::open(place.path("state/wanted.db")).unwrap();
            raw.pragma_update(None, "user_version", 99).unwrap();
            raw.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").unwrap();
        }),
        ("damaged", "the store is damaged", |place| {
            std::fs::write(place.path("state/wanted.db"), "{\"schema_version\": 99}".repeat(300))
                .unwrap();
            drop(std::fs::remove_file(place.path("state/wanted.db-wal")));
        }),
    ];
    for (what, wanted, harm) in cases {
        let place = Place::reference("");
        let agent = place.start().await;
        place.feed(&["apply", "-f", "-", "--wait=20"], &volume("a", 1)).await.expect(0);
        assert_eq!(agent.stop().await, 0);
        harm(&place);
        let before = std::fs::read(place.path("state/wanted.db")).unwrap();
        let agent = place.start().await;
        place.cli(&["get"]).await.expect(0);
        for args in [&["delete", "volume", "a"] as &[&str], &["stop", "x"]] {
            let left = place.cli(args).await.expect(1);
            assert!(left.err.contains(wanted), "{what}: {left:?}");
        }
        let left = place.feed(&["apply", "-f", "-"], &volume("b", 1)).await.expect(1);
        assert!(left.err.contains(wanted), "{what}: {left:?}");
        let doctor = place.cli(&["doctor"]).await.expect(1);
        assert!(doctor.out.contains(wanted), "{what}: {doctor:?}");
        assert_eq!(agent.stop().await, 4, "{what}");
        assert_eq!(std::fs::read(place.path("state/wanted.db")).unwrap(), before, "{what}");
    }
}

#[tokio::test]
async fn who_may_open_the_socket_may_read_and_only_root_and_the_group_may_write() {
    let place = Place::reference("socket_mode = \"0666\"\nwrite_group = \"4242\"");
    let _agent = place.start().await;
    std::fs::set_permissions(place.dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o711))
        .unwrap();
    let as_user = |groups: &[&str], args: &[&str]| {
        Run::new("setpriv")
            .args(["--reuid=61234", "--regid=61234"])
            .args(groups)
            .args([BIN, "--socket", &place.text("s")])
            .args(args)
            .stdin(volume("a", 1))
    };
    // The binary may lie below a directory that others cannot enter; then this test cannot be run as another user.
    let stranger = ["--clear-groups"];
    run(as_user(&stranger, &["get"])).await.expect(0);
    let left = run(as_user(&stranger, &["apply", "-f", "-"])).await.expect(1);
    assert!(left.err.contains("user 61234 may read only"), "{left:?}");
    let left = run(as_user(&stranger, &["logs", "x"])).await.expect(1);
    assert!(left.err.contains("may read only"), "{left:?}");
    run(as_user(&["--groups=4242"], &["apply", "-f", "-"])).await.expect(0);
    place.cli(&["delete", "volume", "a", "--wait=10"]).await.expect(0);
}

#[tokio::test]
async fn the_service_manager_is_told_when_the_agent_is_ready() {
    let place = Place::reference("");
    let socket = UnixDatagram::bind(place.path("notify")).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let agent = place.start_with(&[("NOTIFY_SOCKET", &place.text("notify"))]).await;
    let mut buffer = [0; 64];
    let read = socket.recv(&mut buffer).unwrap();
    assert_eq!(&buffer[..read], b"READY=1");
    assert_eq!(agent.stop().await, 0);
    let read = socket.recv(&mut buffer).unwrap();
    assert_eq!(&buffer[..read], b"STOPPING=1");
}

#[tokio::test]
async fn a_driver_is_tested_without_an_agent() {
    let place = Place::reference("");
    let left = place.cli(&["driver", "test", "file-volume", "-o", "json"]).await.expect(0).json();
    let cases = left[0]["cases"].as_array().unwrap();
    assert!(
        cases.len() > 20 && cases.iter().all(|case| case["verdict"] != json!("FAILED")),
        "{left:#}"
    );
    let left = place.cli(&["driver", "test", "nonesuch"]).await.expect(1);
    assert!(left.err.contains("nonesuch"), "{left:?}");
}
