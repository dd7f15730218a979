//! The way from a registry: redirects, credentials, busy servers, broken connections, many callers.

#![cfg(test)]

mod common;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use common::{Bed, Reports, expect_kind, noise, raw_disk, read_data, within};
use driver_oci_image::RegistryCredentials;
use drivers_api::{
    BoxFuture, CancelFlag, Context, ErrorKind, Image, ImageRef, Result, SecretRef, SecretResolver,
    SecretValue,
};
use testbed::registry::{Artifact, FakeRegistry, Reply, digest_of};
use tokio::time::Instant;

const PASSWORD: &str = "CANARY-5f1d";
/// Base64 of `u:CANARY-5f1d`.
const BASIC: &str = "dTpDQU5BUlktNWYxZA==";

struct Secrets;

impl SecretResolver for Secrets {
    fn resolve<'a>(&'a self, _: &'a SecretRef) -> BoxFuture<'a, Result<SecretValue>> {
        Box::pin(async { Ok(SecretValue::new(PASSWORD.as_bytes().to_vec())) })
    }
}

fn user(registry: &FakeRegistry) -> RegistryCredentials {
    RegistryCredentials::new(registry.host(), "u", "env://PASSWORD".parse().unwrap())
}

fn with_secrets() -> Context {
    within(Duration::from_secs(30)).with_secrets(Arc::new(Secrets))
}

fn script(name: &str, other: &FakeRegistry) -> String {
    String::from_utf8(read_data(name))
        .unwrap()
        .replace("other.test", "localhost")
        .replace("@PORT2@", &other.port().to_string())
}

/// Whether a server saw anything that it must not see.
fn saw_a_secret(server: &FakeRegistry) -> bool {
    server.seen().iter().any(|seen| {
        seen.headers.contains_key("authorization")
            || seen.headers.contains_key("cookie")
            || seen.path.contains(PASSWORD)
            || seen.headers.values().any(|value| value.contains(PASSWORD) || value.contains(BASIC))
    })
}

#[tokio::test]
async fn pro_04_a_redirect_to_another_host_is_followed_without_credentials() {
    let registry = FakeRegistry::start().await.unwrap();
    let other = FakeRegistry::start().await.unwrap();
    let artifact = raw_disk(&noise(4, 50_000));
    let digest = registry.put("priv", "1", &artifact);
    let blob = digest_of(&artifact.layers[0].bytes);
    registry.require_basic(BASIC);
    other.put_file("/blob", &artifact.layers[0].bytes);
    // Once unasked, so that the credentials are known when the redirect comes.
    registry.script("/blobs/", 1, Reply::Raw(script("pro04/redirect-other-host.http", &other)));
    let bed = Bed::with(|config| config.credentials = vec![user(&registry)]);
    let reference: ImageRef = format!("{}/priv:1", registry.host()).parse().unwrap();
    let outcome = bed.driver.pull(&with_secrets(), &reference).await.unwrap();
    assert_eq!(outcome.value.digest.as_str(), digest);
    assert_eq!(other.count("/blob"), 1);
    assert!(!saw_a_secret(&other), "{:?}", other.seen());
    assert!(registry.seen().iter().any(|seen| seen.headers.contains_key("authorization")));

    // The digest is checked behind a redirect too, and another port of the same host is another host.
    other.put_file("/blob", b"evil");
    registry.script(&blob, 9, Reply::Raw(script("pro04/redirect-other-host.http", &other)));
    let bed = Bed::with(|config| config.credentials = vec![user(&registry)]);
    let error = bed.driver.pull(&with_secrets(), &reference).await.unwrap_err();
    expect_kind(&error, ErrorKind::InvalidSpec, "digest mismatch");
    let same = script("pro04/redirect-other-host.http", &other).replace("localhost", "127.0.0.1");
    registry.script("/manifests/", 1, Reply::Raw(same.replace("/blob", "/v2/priv/manifests/1")));
    other.put("priv", "1", &artifact);
    other.put_file("/blob", &artifact.layers[0].bytes);
    drop(bed.driver.pull(&with_secrets(), &reference).await.unwrap().value);
    assert!(!saw_a_secret(&other), "{:?}", other.seen());
}

#[tokio::test]
async fn pro_04_relative_redirects_work_and_loops_and_downgrades_are_refused() {
    let registry = FakeRegistry::start().await.unwrap();
    let artifact = raw_disk(&noise(5, 1000));
    let blob = digest_of(&artifact.layers[0].bytes);
    registry.put("r", "1", &artifact);
    registry.put_file("/v2/cdn/blob", &artifact.layers[0].bytes);
    registry.script(&blob, 1, Reply::Raw(script("pro04/redirect-relative.http", &registry)));
    Bed::new().got(&format!("{}/r:1", registry.host())).await;
    assert_eq!(registry.count("/v2/cdn/blob"), 1);

    registry.script(&blob, 99, Reply::Raw(script("pro04/redirect-loop.http", &registry)));
    let before = registry.count(&blob);
    let error = Bed::new().refused(&format!("{}/r:1", registry.host())).await;
    expect_kind(&error, ErrorKind::Denied, "more than 10 redirects");
    assert_eq!(registry.count(&blob) - before, 11);

    let tls =
        FakeRegistry::start_tls(&read_data("tls-server.pem"), &read_data("tls-server-key.pem"))
            .await
            .unwrap();
    let plain = script("pro04/redirect-downgrade.http", &registry)
        .replace("registry.test", "localhost")
        .replace("@PORT@", &registry.port().to_string());
    registry.put_file("/blob", b"x");
    tls.script("/image.raw", 1, Reply::Raw(plain));
    tls.put_file("/image.raw", b"x");
    let source = format!("https://localhost:{}/image.raw#{}", tls.port(), digest_of(b"x"));
    let trusting = |config: &mut driver_oci_image::OciImageConfig| {
        config.extra_roots = vec![common::data("tls-ca.pem")];
    };
    let error = Bed::with(trusting).refused(&source).await;
    expect_kind(&error, ErrorKind::Denied, "from https to http");
    assert!(registry.seen().iter().all(|seen| seen.path != "/blob"), "nothing was asked for");
    Bed::with(trusting).got(&source).await;
    // Without the authority the certificate is not trusted.
    let error = Bed::new().refused(&source).await;
    expect_kind(&error, ErrorKind::Unavailable, "certificate");
}

#[tokio::test]
async fn pro_04_a_token_service_on_another_host_gets_nothing_unless_it_is_listed() {
    let registry = FakeRegistry::start().await.unwrap();
    let other = FakeRegistry::start().await.unwrap();
    let artifact = raw_disk(&noise(6, 1000));
    registry.put("t", "1", &artifact);
    other.put_file("/token", b"{\"token\":\"TOKEN-1\"}");
    let realm = script("pro04/realm-other-host.http", &other);
    let reference: ImageRef = format!("{}/t:1", registry.host()).parse().unwrap();

    registry.script("/manifests/", 1, Reply::Raw(realm.clone()));
    let bed = Bed::with(|config| config.credentials = vec![user(&registry)]);
    let error = bed.driver.pull(&with_secrets(), &reference).await.unwrap_err();
    expect_kind(&error, ErrorKind::Denied, "token_hosts");
    assert!(!error.chain().contains(PASSWORD) && !error.chain().contains(BASIC));
    assert_eq!(other.seen().len(), 0);

    registry.script("/manifests/", 1, Reply::Raw(realm));
    let bed = Bed::with(|config| {
        config.credentials = vec![user(&registry)];
        config.token_hosts = vec![format!("localhost:{}", other.port())];
    });
    drop(bed.driver.pull(&with_secrets(), &reference).await.unwrap().value);
    let asked = other.seen();
    assert_eq!(asked.len(), 1);
    assert!(asked[0].path.contains("scope=repository%3At%3Apull"), "{}", asked[0].path);
    assert!(asked[0].path.contains("service=registry.test"));
    let token = Some("Bearer TOKEN-1".to_owned());
    assert_eq!(registry.seen().last().unwrap().headers.get("authorization").cloned(), token);
}

#[tokio::test]
async fn pro_04_without_credentials_the_registry_s_no_is_denied() {
    let registry = FakeRegistry::start().await.unwrap();
    registry.put("p", "1", &raw_disk(b"x"));
    registry.require_basic(BASIC);
    let error = Bed::new().refused(&format!("{}/p:1", registry.host())).await;
    expect_kind(&error, ErrorKind::Denied, "user and password");
}

#[tokio::test]
async fn res_04_a_busy_registry_is_left_alone_by_all_at_once() {
    for (file, least, most) in [
        ("429-seconds", 2.0, 3.0),
        ("429-date", 2.0, 4.5),
        ("429-none", 1.0, 1.5),
        ("429-negative", 1.0, 1.5),
        ("503-seconds", 1.0, 1.5),
    ] {
        let registry = FakeRegistry::start().await.unwrap();
        let bed = Bed::new();
        let date = std::time::SystemTime::now() + Duration::from_secs(3);
        let answer = String::from_utf8(read_data(&format!("res04/{file}.http"))).unwrap();
        let answer = answer.replace("@NOW_PLUS_3S_HTTP_DATE@", &httpdate::fmt_http_date(date));
        registry.script("/manifests/", 1, Reply::Raw(answer));
        let mut pulls = tokio::task::JoinSet::new();
        for at in 0..50 {
            registry.put("busy", &format!("t{at}"), &raw_disk(format!("disk {at}").as_bytes()));
            let driver = Arc::clone(&bed.driver);
            let reference: ImageRef = format!("{}/busy:t{at}", registry.host()).parse().unwrap();
            pulls.spawn(
                async move { driver.pull(&within(Duration::from_secs(30)), &reference).await },
            );
        }
        let begun = Instant::now();
        while let Some(outcome) = pulls.join_next().await {
            drop(outcome.unwrap().unwrap().value);
        }
        let seen = registry.seen();
        let first = seen.first().unwrap().at;
        let second = seen.get(1).unwrap().at;
        let gap = (second - first).as_secs_f64();
        assert!(gap >= least && gap < most, "{file}: the gate was shut for {gap} s");
        let early = seen.iter().filter(|seen| (seen.at - begun).as_secs_f64() < least).count();
        assert_eq!(early, 1, "{file}: one request for 50 pulls until the gate opens");
    }
}

#[tokio::test]
async fn res_04_a_registry_that_stays_busy_gets_one_request_a_window_and_the_windows_grow() {
    let registry = FakeRegistry::start().await.unwrap();
    let bed = Bed::new();
    let answer = String::from_utf8(read_data("res04/429-none.http")).unwrap();
    // The first pull is answered, so the gate is open when the refusals begin.
    registry.put("busy", "first", &raw_disk(b"first"));
    bed.got(&format!("{}/busy:first", registry.host())).await;
    let before = registry.seen().len();
    registry.script("/manifests/", 4, Reply::Raw(answer));
    let mut pulls = tokio::task::JoinSet::new();
    for at in 0..50 {
        registry.put("busy", &format!("t{at}"), &raw_disk(format!("disk {at}").as_bytes()));
        let driver = Arc::clone(&bed.driver);
        let reference: ImageRef = format!("{}/busy:t{at}", registry.host()).parse().unwrap();
        pulls.spawn(async move { driver.pull(&within(Duration::from_secs(60)), &reference).await });
    }
    while let Some(outcome) = pulls.join_next().await {
        drop(outcome.unwrap().unwrap().value);
    }
    let times: Vec<Instant> = registry.seen().iter().skip(before).map(|seen| seen.at).collect();
    // Windows are told apart by pauses of at least a second.
    let mut windows = vec![1_usize];
    for pair in times.windows(2) {
        if pair[1] - pair[0] >= Duration::from_millis(900) {
            windows.push(1);
        } else {
            *windows.last_mut().unwrap() += 1;
        }
    }
    let refused = &windows[..windows.len() - 1];
    assert!(refused.len() >= 3 && refused.iter().all(|count| *count <= 2), "{windows:?}");
}

#[tokio::test]
async fn res_04_a_wait_that_a_registry_asks_for_can_be_cancelled() {
    let registry = FakeRegistry::start().await.unwrap();
    registry.put("busy", "1", &raw_disk(b"x"));
    let huge = String::from_utf8(read_data("res04/429-huge.http")).unwrap();
    registry.script("/manifests/", 99, Reply::Raw(huge));
    let bed = Bed::new();
    let flag = CancelFlag::new();
    let cx = within(Duration::from_secs(30)).with_cancel(flag.clone());
    let reference: ImageRef = format!("{}/busy:1", registry.host()).parse().unwrap();
    let pull = bed.driver.pull(&cx, &reference);
    let cancel = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        flag.cancel();
        Instant::now()
    };
    let (answer, cancelled) = tokio::join!(pull, cancel);
    assert!(cancelled.elapsed() < Duration::from_millis(500));
    assert_eq!(answer.unwrap_err().kind(), ErrorKind::Cancelled);
    assert_eq!(registry.seen().len(), 1);
}

#[tokio::test]
async fn a_broken_download_goes_on_where_it_ended_and_what_is_wrong_begins_anew_once() {
    let registry = FakeRegistry::start().await.unwrap();
    let bytes = noise(8, 600_000);
    let blob = digest_of(&bytes);
    registry.put("cut", "1", &raw_disk(&bytes));
    registry.script(&blob, 1, Reply::Cut(200_000));
    registry.script(&blob, 1, Reply::Cut(100_000));
    let reference = format!("{}/cut:1", registry.host());
    let bed = Bed::new();
    bed.got(&reference).await;
    let ranges: Vec<Option<String>> = registry
        .seen()
        .iter()
        .filter(|seen| seen.path.contains(&blob))
        .map(|seen| seen.headers.get("range").cloned())
        .collect();
    let range = |from: usize| Some(format!("bytes={from}-"));
    assert_eq!(ranges, [None, range(200_000), range(300_000)]);
    assert_eq!(registry.sent() - manifest_size(&bytes), 600_000, "no byte twice");

    // What an earlier process left is used when it is right.
    let bed = Bed::new();
    let partial = bed.cache().join("partial").join(blob.trim_start_matches("sha256:"));
    std::fs::write(&partial, &bytes[..500_000]).unwrap();
    bed.got(&reference).await;
    assert_eq!(registry.seen().last().unwrap().headers.get("range").cloned(), range(500_000));
    // And thrown away when it is wrong, once.
    let bed = Bed::new();
    let partial = bed.cache().join("partial").join(blob.trim_start_matches("sha256:"));
    std::fs::write(&partial, noise(99, 500_000)).unwrap();
    let before = registry.count(&blob);
    bed.got(&reference).await;
    assert_eq!(registry.count(&blob) - before, 2);
    // A server without ranges sends all of it again.
    let bed = Bed::new();
    let partial = bed.cache().join("partial").join(blob.trim_start_matches("sha256:"));
    std::fs::write(&partial, &bytes[..500_000]).unwrap();
    registry.script(&blob, 1, Reply::IgnoreRange);
    bed.got(&reference).await;
}

fn manifest_size(bytes: &[u8]) -> u64 {
    u64::try_from(raw_disk(bytes).manifest().bytes.len()).unwrap()
}

#[tokio::test]
async fn a_server_that_never_gets_further_is_given_up() {
    let registry = FakeRegistry::start().await.unwrap();
    let bytes = noise(8, 600_000);
    registry.put("cut", "1", &raw_disk(&bytes));
    registry.script(&digest_of(&bytes), 99, Reply::Cut(0));
    let bed = Bed::new();
    let error = bed.refused(&format!("{}/cut:1", registry.host())).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(registry.count(&digest_of(&bytes)) <= 4);
}

#[tokio::test]
async fn race_01_twenty_pulls_are_one_download_and_each_caller_keeps_its_own_end() {
    let registry = FakeRegistry::start().await.unwrap();
    let bytes = noise(9, 8 << 20);
    let blob = digest_of(&bytes);
    let digest = registry.put("race", "1", &raw_disk(&bytes));
    registry.throttle(Some(1 << 20));
    let bed = Bed::new();
    let by_tag: ImageRef = format!("{}/race:1", registry.host()).parse().unwrap();
    let by_digest: ImageRef = format!("{}/race@{digest}", registry.host()).parse().unwrap();
    let flag = CancelFlag::new();
    let reports = Arc::new(Reports::default());
    let mut pulls = tokio::task::JoinSet::new();
    let begun = Instant::now();
    for at in 0..22_usize {
        let driver = Arc::clone(&bed.driver);
        let reference = if at % 2 == 0 { by_tag.clone() } else { by_digest.clone() };
        let cx = match at {
            0 => within(Duration::from_secs(60)).with_cancel(flag.clone()),
            1 => within(Duration::from_secs(2)),
            2 => within(Duration::from_secs(60)).with_progress(reports.clone()),
            _ => within(Duration::from_secs(60)),
        };
        pulls.spawn(async move { (at, driver.pull(&cx, &reference).await, begun.elapsed()) });
    }
    // One caller whose future is dropped: its connection is gone.
    let gone = tokio::spawn({
        let (driver, reference) = (Arc::clone(&bed.driver), by_tag.clone());
        async move { driver.pull(&within(Duration::from_secs(60)), &reference).await.map(drop) }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    flag.cancel();
    gone.abort();
    let mut paths = Vec::new();
    while let Some(ended) = pulls.join_next().await {
        let (at, answer, after) = ended.unwrap();
        match at {
            0 => {
                assert_eq!(answer.unwrap_err().kind(), ErrorKind::Cancelled);
                assert!(after < Duration::from_millis(1500), "{after:?}");
            }
            1 => {
                assert_eq!(answer.unwrap_err().kind(), ErrorKind::Deadline);
                assert!(after >= Duration::from_secs(2) && after < Duration::from_millis(2500));
            }
            _ => paths.push(answer.unwrap().value.files.main_path().clone()),
        }
    }
    assert_eq!(paths.len(), 20);
    assert!(paths.windows(2).all(|pair| pair[0] == pair[1]));
    assert_eq!(registry.count(&blob), 1, "exactly one GET for the blob");
    let reports = reports.0.lock().unwrap();
    let amounts: Vec<u64> =
        reports.iter().filter(|report| report.phase == "download").map(|r| r.done).collect();
    assert!(amounts.len() > 3 && amounts.is_sorted(), "{amounts:?}");
    assert!(reports.iter().any(|report| report.total == Some(8 << 20)));
}

#[tokio::test]
async fn race_01_the_download_stops_when_nobody_waits_any_more_and_is_resumed_later() {
    let registry = FakeRegistry::start().await.unwrap();
    let bytes = noise(10, 4 << 20);
    registry.put("race", "1", &raw_disk(&bytes));
    registry.throttle(Some(1 << 20));
    let bed = Bed::new();
    let reference: ImageRef = format!("{}/race:1", registry.host()).parse().unwrap();
    let mut pulls = tokio::task::JoinSet::new();
    for _ in 0..3 {
        let (driver, reference) = (Arc::clone(&bed.driver), reference.clone());
        pulls.spawn(async move { driver.pull(&within(Duration::from_secs(1)), &reference).await });
    }
    while let Some(ended) = pulls.join_next().await {
        assert_eq!(ended.unwrap().unwrap_err().kind(), ErrorKind::Deadline);
    }
    assert!(registry.idle_within(Duration::from_secs(1)).await, "the connection is closed");
    let sent = registry.sent();
    assert!(sent < 3 << 20, "{sent} bytes were sent");
    bed.settled().await;
    assert_eq!(bed.files("content"), Vec::<String>::new());
    assert_eq!(bed.files("partial").len(), 1, "kept for the next attempt");
    registry.throttle(None);
    bed.got(reference.as_str()).await;
    assert!(registry.seen().last().unwrap().headers.contains_key("range"), "it went on");
}

#[tokio::test]
async fn two_images_that_share_a_blob_do_not_disturb_each_other() {
    let registry = FakeRegistry::start().await.unwrap();
    let shared = noise(11, 300_000);
    let image = |own: &[u8]| -> Artifact {
        let mut artifact = common::kernel(1);
        artifact.layers[0].bytes = shared.clone();
        artifact.layers[1].bytes = own.to_vec();
        artifact
    };
    let bed = Bed::new();
    let mut pulls = tokio::task::JoinSet::new();
    registry.throttle(Some(1 << 20));
    for at in 0..3_u64 {
        registry.put("share", &format!("t{at}"), &image(&noise(at + 50, 1000)));
        let driver = Arc::clone(&bed.driver);
        let reference: ImageRef = format!("{}/share:t{at}", registry.host()).parse().unwrap();
        pulls.spawn(async move { driver.pull(&within(Duration::from_secs(30)), &reference).await });
    }
    let seen = Mutex::new(0);
    while let Some(outcome) = pulls.join_next().await {
        let path = outcome.unwrap().unwrap().value.files.main_path().clone();
        assert!(std::fs::read(path.as_path()).unwrap() == shared);
        *seen.lock().unwrap() += 1;
    }
    assert_eq!(*seen.lock().unwrap(), 3);
}
