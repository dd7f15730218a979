//! Images of real registries: passwords that stay secret, and a cache that keeps its limit.

use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use testbed::{
    netns::in_netns,
    registry::{Artifact, Blob, FakeRegistry},
};
use tokio::time::Instant;

use crate::common::{Left, Place, Running};

const PASSWORD: &str = "CANARY-5f1d";
/// Base64 of `u:CANARY-5f1d`.
const BASIC: &str = "dTpDQU5BUlktNWYxZA==";
const MIB: usize = 1 << 20;

/// A raw disk of a MiB whose bytes no other number has.
fn disk(n: u8) -> Artifact {
    let mut bytes = vec![n; MIB];
    bytes[0] = !n;
    Artifact::new(vec![Blob::new("application/vnd.bcd.disk.raw.v1", bytes)])
}

fn manifest(name: &str, reference: &str) -> String {
    format!("---\napi_version: bcd/v1\nkind: Image\nname: {name}\nspec: {{ref: '{reference}'}}\n")
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        match entry.file_type().unwrap() {
            kind if kind.is_dir() => found.extend(files(&entry.path())),
            kind if kind.is_file() => found.push(entry.path()),
            _ => {}
        }
    }
    found
}

/// Fails when somebody could read the password.
#[track_caller]
fn assert_secret(what: &str, bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    assert!(!text.contains(PASSWORD) && !text.contains(BASIC), "{what} tells the password: {text}");
}

fn assert_all_secret(place: &Place, agent: &Running, answers: &[Left]) {
    for answer in answers {
        assert_secret("an answer", format!("{answer:?}").as_bytes());
    }
    for name in ["cmdline", "environ"] {
        let path = format!("/proc/{}/{name}", agent.pid());
        assert_secret(&path, &std::fs::read(&path).unwrap());
    }
    for path in files(place.dir.path()) {
        if !path.starts_with(place.path("secrets")) {
            assert_secret(&path.display().to_string(), &std::fs::read(&path).unwrap());
        }
    }
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_password_reaches_its_registry_and_is_told_nowhere() {
    in_netns(|| async {
        let registry = FakeRegistry::start().await.unwrap();
        registry.require_basic(BASIC);
        for n in 1..=3 {
            registry.put("private", &n.to_string(), &disk(n));
        }
        let host = registry.host();
        let place = Place::real("[log]\nlevel = \"trace\"");
        let text = std::fs::read_to_string(place.path("config.toml")).unwrap();
        let more = format!(
            "{text}\n[secrets]\ndir = \"{}\"\n[[images.registry]]\nhost = \"{host}\"\nusername = \"u\"\n\
             password = \"secret://registry\"\n",
            place.text("secrets")
        );
        std::fs::write(place.path("config.toml"), more).unwrap();
        std::fs::create_dir(place.path("secrets")).unwrap();
        set_mode(&place.path("secrets"), 0o700);
        let secret = place.path("secrets/registry");
        std::fs::write(&secret, format!("{PASSWORD}\n")).unwrap();
        set_mode(&secret, 0o600);
        let agent = place.start().await;

        let mut answers = Vec::new();
        // What is wrong with the file is told, and what is in it is not.
        set_mode(&secret, 0o640);
        let refused = place.cli(&["images", "pull", &format!("{host}/private:3")]).await.expect(1);
        assert!(
            refused.err.contains("has mode 0640") && refused.err.contains("chmod 0600"),
            "{refused:?}"
        );
        answers.push(refused);
        set_mode(&secret, 0o600);
        let wanted = manifest("one", &format!("{host}/private:1"));
        answers.push(place.feed(&["apply", "-f", "-", "--wait=30"], &wanted).await.expect(0));
        let pulled = place.cli(&["images", "pull", &format!("{host}/private:2")]).await;
        answers.push(pulled.expect(0));
        // A password that the registry does not take.
        registry.require_basic("b3RoZXI=");
        answers.push(place.cli(&["images", "pull", &format!("{host}/private:3")]).await.expect(1));
        for args in [
            &["describe", "image", "one"] as &[&str],
            &["events"],
            &["get", "-o", "json"],
            &["doctor"],
        ] {
            answers.push(place.cli(args).await);
        }
        assert!(place.log().contains("TRACE"), "the log tells everything that it has");
        assert_all_secret(&place, &agent, &answers);
        assert_eq!(agent.stop().await, 0);
        // The store too, after its last write.
        for path in files(&place.path("state")) {
            assert_secret(&path.display().to_string(), &std::fs::read(&path).unwrap());
        }
    });
}

/// Which of the registry's images are in the cache, by their first byte.
fn cached(place: &Place) -> Vec<u8> {
    let mut found: Vec<u8> = files(&place.path("state/images/content"))
        .into_iter()
        .filter(|path| std::fs::metadata(path).unwrap().len() == MIB as u64)
        .map(|path| std::fs::read(path).unwrap()[1])
        .collect();
    found.sort_unstable();
    found
}

/// Waits until the cache holds these.
async fn holds(place: &Place, wanted: &[u8]) {
    let begun = Instant::now();
    while cached(place) != wanted {
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}: {}", cached(place), place.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn with_limit(place: &Place, bytes: usize, seconds: u32) {
    let text = std::fs::read_to_string(place.path("config.toml")).unwrap();
    let base = text.split("[images]").next().unwrap();
    let more = format!("{base}[images]\nmax_cache_bytes = {bytes}\ncollect_seconds = {seconds}\n");
    std::fs::write(place.path("config.toml"), more).unwrap();
}

#[test]
fn what_nobody_wants_stays_until_the_cache_is_full_and_what_is_wanted_stays_for_ever() {
    in_netns(|| async {
        let registry = FakeRegistry::start().await.unwrap();
        for n in 1..=6 {
            registry.put("kit", &n.to_string(), &disk(n));
        }
        let reference = |n: u8| format!("{}/kit:{n}", registry.host());
        let place = Place::real("");
        with_limit(&place, 4 * MIB + MIB / 2, 3600);
        let agent = place.start().await;
        place
            .feed(&["apply", "-f", "-", "--wait=30"], &manifest("one", &reference(1)))
            .await
            .expect(0);
        for n in 2..=4 {
            place.cli(&["images", "pull", &reference(n)]).await.expect(0);
        }
        place.cli(&["delete", "image", "none-such"]).await.expect(0);
        holds(&place, &[1, 2, 3, 4]).await;
        // No room for a fifth: what nobody wants goes, and the pull goes on.
        place.cli(&["images", "pull", &reference(5)]).await.expect(0);
        assert_eq!(cached(&place), [1, 5]);
        let events = place.cli(&["events"]).await.expect(0).out;
        assert!(events.contains("3 images that nobody wants went"), "{events}");
        // The reconciler finds none either, and collects before it tries again.
        for n in 2..=3 {
            place.cli(&["images", "pull", &reference(n)]).await.expect(0);
        }
        place
            .feed(&["apply", "-f", "-", "--wait=30"], &manifest("six", &reference(6)))
            .await
            .expect(0);
        holds(&place, &[1, 6]).await;
        // An object that is gone is a cause to look: the limit holds, so the unwanted one stays.
        place.cli(&["images", "pull", &reference(2)]).await.expect(0);
        place.cli(&["delete", "image", "six", "--wait=10"]).await.expect(0);
        holds(&place, &[1, 2]).await;
        assert_eq!(agent.stop().await, 0);

        // A lower limit takes effect by the timer, and never on what is wanted.
        with_limit(&place, 1, 1);
        let agent = place.start().await;
        holds(&place, &[1]).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(cached(&place), [1]);
        assert_eq!(
            place.object("image", "one").await["status"]["phase"],
            serde_json::json!("Ready")
        );
        assert_eq!(agent.stop().await, 0);
    });
}
