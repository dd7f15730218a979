//! Runs the cases of a kind one after the other: panics caught, what they made cleared, the census taken.

use std::{panic::AssertUnwindSafe, sync::atomic::Ordering, time::Duration};

use futures_util::FutureExt;
use tokio::time::Instant;

use crate::{
    CaseReport, Census, DriverKind, Report, Verdict,
    kit::{Case, Check, Run, Stop, Subject, failed},
};

/// One run of the kit at a time in a process: the census counts the process.
static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Runs the cases of one kind.
pub(crate) async fn run_cases<K: Subject>(kit: &K, kind: DriverKind, cases: &[Case<K>]) -> Report {
    let _turn = ONE_AT_A_TIME.lock().await;
    let mut report = Report { kind, driver: String::new(), backend: None, cases: Vec::new() };
    let begun = Instant::now();
    let info = catch(kit.info()).await;
    let mut record = |name, sentence, begun: Instant, ended: Check| {
        let verdict = match ended {
            Ok(()) => Verdict::Passed,
            Err(Stop::Failed(why)) => Verdict::Failed(why),
            Err(Stop::NotApplicable(why)) => Verdict::NotApplicable(why),
            Err(Stop::NotTried(why)) => Verdict::NotTried(why),
        };
        report.cases.push(CaseReport { name, sentence, verdict, took: begun.elapsed() });
    };
    let (info, opened) = match info {
        Ok(info) => (Some(info), Ok(())),
        Err(stop) => (None, Err(stop)),
    };
    record(
        "host-info",
        "HostInfo identifies a compute node, so that the scheduler and audit logs can confirm where a side effect landed.",
        begun,
        opened,
    );
    let before = census(kit).await;
    for (case, at) in cases.iter().zip(1..) {
        let only = &kit.run().options.only;
        if !only.is_empty() && !only.iter().any(|text| case.name.contains(text.as_str())) {
            continue;
        }
        kit.run().base.store(at * Run::BLOCK, Ordering::Relaxed);
        let begun = Instant::now();
        let ended = catch((case.run)(kit)).await;
        let cleared = catch(kit.clear()).await;
        let ended = match (ended, cleared) {
            (Err(Stop::Failed(why)), Err(Stop::Failed(also))) => {
                failed(format_args!("{why}\nand it could not be cleared: {also}"))
            }
            (Ok(()) | Err(Stop::NotApplicable(_) | Stop::NotTried(_)), Err(stop)) => Err(stop),
            (ended, _) => ended,
        };
        record(case.name, case.sentence, begun, ended);
    }
    let begun = Instant::now();
    let polls = kit.run().check_polls();
    record("executor", "A call never blocks the executor.", begun, polls);
    let settled = settle(kit, &before).await;
    record(
        "census",
        "A call that ended left nothing behind: no descriptor, process, link, rule or file.",
        begun,
        settled,
    );
    if let Some(info) = info {
        report.driver = info.driver;
        report.backend = info.backend_version;
    }
    report
}

/// Runs a part of a case; a panic of the driver is a failure of it.
async fn catch<T>(part: impl Future<Output = Check<T>>) -> Check<T> {
    match AssertUnwindSafe(part).catch_unwind().await {
        Ok(ended) => ended,
        Err(panic) => {
            let text = panic
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned());
            failed(format_args!("a panic crossed the trait: {}", text.unwrap_or_default()))
        }
    }
}

/// The census of the back-end, and that of this process.
async fn census<K: Subject>(kit: &K) -> Result<(Census, Census), String> {
    let mut process = Census::new();
    if kit.run().options.process_census {
        process.add_process().map_err(|error| format!("/proc cannot be read: {error}"))?;
    }
    Ok((kit.census().await, process))
}

/// Waits until the census is what it was before, for as long as the options allow.
async fn settle<K: Subject>(kit: &K, before: &Result<(Census, Census), String>) -> Check {
    let before = before.as_ref().map_err(|why| Stop::NotTried(why.clone()))?;
    let end = Instant::now() + kit.run().options.settle;
    loop {
        let after = census(kit).await.map_err(Stop::NotTried)?;
        let mut diff = before.0.diff(&after.0);
        // What this process has less than before is no leak.
        diff.extend(before.1.diff(&after.1).into_iter().filter(|line| line.starts_with('+')));
        if diff.is_empty() {
            return Ok(());
        }
        if Instant::now() >= end {
            return failed(diff.join("\n"));
        }
        // The kernel and the runtime let go of descriptors and processes without telling anybody.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
