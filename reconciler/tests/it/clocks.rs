//! Waits follow the monotonic clock alone (STK-03).

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use conformance::reference::{Fault, Op};
use drivers_api::ErrorKind;
use reconciler::wanted::Kind;

use super::common::{Node, converged, key, volume};

/// What reads the wall clock, or a time that was kept of it.
const WALL: [&str; 7] = [
    "SystemTime",
    "UNIX_EPOCH",
    "ClockId::Realtime",
    "CLOCK_REALTIME",
    "chrono::",
    "OffsetDateTime",
    "httpdate",
];

/// The files that may, and why none of it decides how long anything waits that the project itself measures.
const ALLOWED: [(&str, &str); 8] = [
    ("reconciler/src/note.rs", "`failing_since` of a status, for people"),
    ("node-agent/src/events.rs", "the time of an event, for people"),
    ("node-agent/src/logging.rs", "the time of a line of the log"),
    ("drivers/oci-image/src/cache/mod.rs", "when an image was used last, kept as a file's time"),
    ("drivers/oci-image/src/collect.rs", "the order in which images were used last"),
    (
        "drivers/oci-image/src/fetch/gate.rs",
        "a registry's `Retry-After` as a date, made a duration at once",
    ),
    ("drivers/oci-image/src/fetch/mod.rs", "the same: what the date is compared with"),
    ("drivers/file-volume/src/source.rs", "the birth of a file, as part of its identity"),
];

fn sources(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
}

#[test]
fn no_decision_reads_the_wall_clock() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut files = Vec::new();
    for part in ["reconciler/src", "node-agent/src", "host/src", "drivers-api/src"] {
        sources(&root.join(part), &mut files);
    }
    for driver in std::fs::read_dir(root.join("drivers")).unwrap() {
        sources(&driver.unwrap().path().join("src"), &mut files);
    }
    assert!(files.len() > 100, "only {} files were found", files.len());
    let allowed: BTreeMap<&str, &str> = ALLOWED.into_iter().collect();
    let mut used = Vec::new();
    for file in files {
        let name = file.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
        let text = std::fs::read_to_string(&file).unwrap();
        let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
        let found: Vec<(usize, &str)> = code
            .enumerate()
            .filter(|(_, line)| WALL.iter().any(|word| line.contains(word)))
            .collect();
        if found.is_empty() {
            continue;
        }
        let lines: Vec<String> =
            found.iter().map(|(at, line)| format!("{name}:{}: {line}", at + 1)).collect();
        assert!(
            allowed.contains_key(name.as_str()),
            "the wall clock is read where it may decide something; use tokio's Instant, or say here why not:\n{}",
            lines.join("\n")
        );
        used.push(name);
    }
    let stale: Vec<&&str> =
        allowed.keys().filter(|file| !used.iter().any(|u| u == **file)).collect();
    assert!(stale.is_empty(), "these no longer read the wall clock: {stale:?}");
}

#[tokio::test(start_paused = true)]
async fn waits_are_those_of_the_monotonic_clock_however_the_wall_clock_goes() {
    // The runtime's clock runs an hour while the wall clock stands: what read the latter would wait for ever.
    let wall = SystemTime::now();
    let mut node = Node::hello();
    node.settings.backoff.jitter = 0.0;
    node.settings.resync = Duration::from_secs(86_400);
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    node.host.inject(Fault::new(Op::EnsureVolume, ErrorKind::Internal).for_ever());
    node.store.apply(volume("lone", 1));
    let before = node.host.calls(Op::EnsureVolume);
    let begun = tokio::time::Instant::now();
    let mut tries = Vec::new();
    while begun.elapsed() < Duration::from_secs(3600) {
        let calls = node.host.calls(Op::EnsureVolume) - before;
        if usize::try_from(calls).unwrap() > tries.len() {
            tries.push(begun.elapsed().as_secs_f64());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let waits: Vec<f64> = tries.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let right = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0].into_iter().chain(std::iter::repeat(60.0));
    for (wait, right) in waits.iter().zip(right) {
        assert!((wait - right).abs() <= right * 0.1, "{wait} s instead of {right} s: {waits:?}");
    }
    assert!((60..70).contains(&waits.len()), "{} waits", waits.len());
    assert!(wall.elapsed().unwrap_or_default() < Duration::from_secs(600));
    let failure = reconciler.status(&key(Kind::Volume, "lone")).unwrap().failure.unwrap();
    // Only for people: the wall clock of the first failure.
    let since = wall.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    assert!(failure.since.abs_diff(since) < 600);
}
