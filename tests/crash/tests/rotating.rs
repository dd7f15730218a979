//! A part of the matrix on each day, and another one tomorrow; `make crash` plays all of it.

#![cfg(test)]

use std::time::Duration;

use drivers_api::Context;
use host::run::Run;

/// No round begins after so many seconds.
const BUDGET: &str = "75";

#[tokio::test]
async fn the_agent_converges_after_a_kill_at_each_point_of_the_days_part() {
    let run = Run::new(env!("CARGO_BIN_EXE_bcd-crash"))
        .args(["--today", "--budget", BUDGET])
        .args(["--logs", concat!(env!("CARGO_TARGET_TMPDIR"), "/crash")])
        .limit(Duration::from_secs(280));
    let output = run.output(&Context::new()).await.unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{error}");
    let held = text.lines().filter(|line| line.starts_with("held")).count();
    // The shortest story has one point, which is played with both sequels.
    assert!(held >= 2, "too little was played in {BUDGET} s:\n{text}");
}
