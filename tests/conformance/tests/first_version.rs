//! The first version of a driver that `docs/driver-authors.md` shows: its code is what is compiled here, and the kit says
//! of it what the page says.

// The page's test names the driver's crate.
extern crate self as my_volume;

#[path = "first_version/bench.rs"]
#[expect(clippy::unwrap_used, unreachable_pub, reason = "the page's text, which shows a test")]
mod bench;
#[path = "first_version/driver.rs"]
#[expect(
    clippy::expect_used,
    missing_docs,
    missing_debug_implementations,
    reason = "the page's text, which shows a first version"
)]
mod driver;

pub use driver::MyVolume;

const PAGE: &str = include_str!("../../../docs/driver-authors.md");

#[test]
fn the_page_shows_the_code_that_is_compiled_here() {
    assert!(PAGE.contains(include_str!("first_version/driver.rs")), "the driver's code differs");
    assert!(PAGE.contains(include_str!("first_version/bench.rs")), "the bench's code differs");
}

#[tokio::test]
async fn the_page_says_what_the_kit_says_of_the_first_version() {
    let options = conformance::Options::default();
    let report = conformance::check_volume(&bench::Bench, &options).await;
    let failed: Vec<&str> = report.failures().map(|case| case.name).collect();
    let line = format!("the driver breaks the contract in {}", failed.join(", "));
    assert!(PAGE.contains(&line), "the page does not have: {line}");
    let text = report.to_string();
    let count = text.lines().last().unwrap_or_default();
    assert!(PAGE.contains(count), "the page does not have: {count}");
}
