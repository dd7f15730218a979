//! One round: a node is brought to a story's start, its agent is killed at a point, and the next one is watched.

use std::time::Duration;

use serde_json::Value;
use testbed::netns::in_netns;
use tokio::time::Instant;

use crate::{
    census::{Census, Detail},
    failure::{Failure, Result},
    node::{Guests, Node},
    scenario::{Command, Scenario, Vmm},
};

/// The longest time until a node has converged. A round that needs it has failed.
const CONVERGES: Duration = Duration::from_secs(25);
/// How long an armed agent may take to reach its point.
const DIES: Duration = Duration::from_secs(20);
/// How long a state must last to count as the end of a story that nothing interrupts.
const SETTLED: Duration = Duration::from_millis(700);
/// The longest time that a round may take.
const LIMIT: Duration = Duration::from_secs(150);
/// Between two looks at the node.
const PAUSE: Duration = Duration::from_millis(100);

/// A point as a story that nothing interrupts passes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Passed {
    pub(crate) point: String,
    /// How often the armed agent passes it before anything is asked of it.
    pub(crate) at_start: usize,
    /// How often it passes it in the story.
    pub(crate) times: usize,
}

/// What a story leads to when nothing interrupts it.
#[derive(Clone, Debug)]
pub(crate) struct Reference {
    /// In the order in which they are reached.
    pub(crate) points: Vec<Passed>,
    /// At the end of the story.
    pub(crate) census: Census,
    /// After everything was deleted.
    pub(crate) cleared: Census,
}

/// What becomes of the wanted state while no agent runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// It stays.
    Same,
    /// All objects are deleted as soon as an agent answers.
    Removed,
}

/// What came of a round.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    /// All held; so long from the agent's start until it was as wanted.
    Held(Duration),
    /// The agent did not come to the point this time.
    NotReached,
    /// Something did not hold.
    Failed(Failure),
}

/// Runs a body on a node of its own, in a network namespace of its own.
fn on_node<T, F>(
    guests: &Guests,
    apart: bool,
    body: impl FnOnce(Node) -> F + Send + 'static,
) -> Result<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T>>,
{
    let guests = guests.clone();
    in_netns(move || async move {
        let all = async { body(Node::new(&guests, apart).await?).await };
        let late = || Failure(format!("the round took longer than {LIMIT:?}"));
        tokio::time::timeout(LIMIT, all).await.unwrap_or_else(|_| Err(late()))
    })
}

/// Runs a story without a fault.
pub(crate) fn reference(guests: &Guests, scenario: Scenario) -> Result<Reference> {
    on_node(guests, scenario.apart, move |mut node| async move {
        let registry = node.registry();
        let fresh = Census::take(node.dir(), &registry, Detail::Left)?;
        prepare(&mut node, scenario).await?;
        let started = node.trace().len();
        node.start(None).await?;
        quiet(&node, SETTLED).await?;
        let (before, idle) = (node.vmms(), node.trace().len());
        for command in scenario.asked(&registry) {
            run(&node, &command, &[]).await?;
        }
        quiet(&node, SETTLED).await?;
        let trace = node.trace();
        let census = Census::take(node.dir(), &registry, scenario.detail())?;
        vmms_are(&node, scenario, &before)?;
        // A story without a question is the start itself.
        let idle = if scenario.asked(&registry).is_empty() { started } else { idle };
        let points = passed(
            trace.get(started..idle).unwrap_or_default(),
            trace.get(idle..).unwrap_or_default(),
        );
        run(&node, &Scenario::removal(&registry), &["--wait=60"]).await?;
        quiet(&node, SETTLED).await?;
        let cleared = Census::take(node.dir(), &registry, Detail::Left)?;
        let left = cleared.against(&fresh);
        let left: Vec<&String> = left.iter().filter(|line| !stays(line)).collect();
        if left.is_empty() {
            return Ok(Reference { points, census, cleared });
        }
        Err(Failure(format!("without a fault a deletion leaves {left:#?}")))
    })
}

/// What a deletion may leave: settings of the kernel that networks need, and whose the cache and the pool are.
fn stays(line: &str) -> bool {
    ["+ setting ", "- setting ", "+ file volumes/pool.json "]
        .iter()
        .any(|kind| line.starts_with(kind))
}

fn passed(at_start: &[String], story: &[String]) -> Vec<Passed> {
    let mut points: Vec<Passed> = Vec::new();
    for point in story {
        match points.iter_mut().find(|passed| passed.point == *point) {
            Some(passed) => passed.times += 1,
            None => points.push(Passed {
                point: point.clone(),
                at_start: at_start.iter().filter(|other| *other == point).count(),
                times: 1,
            }),
        }
    }
    points
}

/// A round.
#[derive(Clone, Debug)]
pub(crate) struct Round {
    pub(crate) scenario: Scenario,
    pub(crate) point: String,
    /// At which passing the agent is killed, counted from its start.
    pub(crate) nth: usize,
    pub(crate) then: Then,
}

/// Runs a round against what an uninterrupted run left. The second part of the answer is the log of the agents.
pub(crate) fn play(guests: &Guests, round: &Round, wanted: &Reference) -> (Outcome, String) {
    let (round, wanted) = (round.clone(), wanted.clone());
    let played = on_node(guests, round.scenario.apart, move |mut node| async move {
        let outcome = interrupted(&mut node, &round, &wanted).await;
        Ok((outcome.unwrap_or_else(Outcome::Failed), node.log()))
    });
    played.unwrap_or_else(|failure| (Outcome::Failed(failure), String::new()))
}

async fn interrupted(node: &mut Node, round: &Round, wanted: &Reference) -> Result<Outcome> {
    let (scenario, registry) = (round.scenario, node.registry());
    prepare(node, scenario).await?;
    let before = node.vmms();
    node.start(Some(&format!("{}@{}=kill", round.point, round.nth))).await?;
    let mut unanswered = Vec::new();
    for command in scenario.asked(&registry) {
        if !ask(node, &command, &[]).await?.ok {
            unanswered.push(command);
        }
    }
    if !node.dies(DIES).await? {
        return Ok(Outcome::NotReached);
    }
    let begun = Instant::now();
    node.start(None).await?;
    match round.then {
        Then::Same => {
            // Who got no answer asks again.
            for command in unanswered {
                run(node, &command, &[]).await?;
            }
            is_as_wanted(node, scenario, &before, &wanted.census).await?;
            let took = begun.elapsed();
            run(node, &Scenario::removal(&registry), &["--wait=60"]).await?;
            is_clear(node, &wanted.cleared).await?;
            Ok(Outcome::Held(took))
        }
        Then::Removed => {
            run(node, &Scenario::removal(&registry), &["--wait=60"]).await?;
            let took = begun.elapsed();
            is_clear(node, &wanted.cleared).await?;
            Ok(Outcome::Held(took))
        }
    }
}

/// Brings the node to the story's start; no agent runs then.
async fn prepare(node: &mut Node, scenario: Scenario) -> Result<()> {
    let commands = scenario.before(&node.registry());
    if commands.is_empty() {
        return Ok(());
    }
    node.start(None).await?;
    for command in commands {
        run(node, &command, &[]).await?;
        quiet(node, Duration::ZERO).await?;
    }
    node.stop().await
}

async fn ask(node: &Node, command: &Command, more: &[&str]) -> Result<crate::node::Answer> {
    let mut args: Vec<&str> = command.args.iter().map(String::as_str).collect();
    args.extend(more);
    node.bcd(&args, &command.stdin).await
}

/// Runs a command that must succeed.
async fn run(node: &Node, command: &Command, more: &[&str]) -> Result<()> {
    let mut args: Vec<&str> = command.args.iter().map(String::as_str).collect();
    args.extend(more);
    node.ok(&args, &command.stdin).await.map(drop)
}

/// What keeps an object from being done, or nothing.
fn undone(object: &Value) -> Option<String> {
    let text = |path: &str| object.pointer(path).and_then(Value::as_str).unwrap_or_default();
    let number = |path: &str| object.pointer(path).and_then(Value::as_u64);
    let generation = number("/status/generation");
    // What waits for a restart that nobody asked for is done.
    let done = matches!(text("/status/phase"), "Ready" | "RestartNeeded")
        && number("/status/observed_generation") == generation;
    let message = format!(
        "{} {}: {} ({}), generation {:?} of {generation:?}",
        text("/kind"),
        text("/name"),
        text("/status/phase"),
        text("/status/message"),
        number("/status/observed_generation")
    );
    (!done).then_some(message)
}

/// Waits until every object is done and stays so for a time, with no point passed meanwhile.
async fn quiet(node: &Node, settled: Duration) -> Result<()> {
    let (begun, mut calm, mut passed) = (Instant::now(), Instant::now(), 0);
    loop {
        let objects = node.objects().await?;
        let waits: Vec<String> = objects.iter().filter_map(undone).collect();
        let now = node.trace().len();
        if !waits.is_empty() || now != passed {
            (calm, passed) = (Instant::now(), now);
        } else if calm.elapsed() >= settled {
            return Ok(());
        }
        if begun.elapsed() > CONVERGES {
            let what = format!("not converged in {CONVERGES:?}: {}", waits.join("; "));
            return Err(node.failed(&what));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Waits until the node is as after an uninterrupted run, and looks again: it must stay so.
async fn is_as_wanted(
    node: &Node,
    scenario: Scenario,
    before: &[u32],
    wanted: &Census,
) -> Result<()> {
    let begun = Instant::now();
    let mut held = false;
    loop {
        let objects = node.objects().await?;
        let waits: Vec<String> = objects.iter().filter_map(undone).collect();
        let differs =
            Census::take(node.dir(), &node.registry(), scenario.detail())?.against(wanted);
        let holds = waits.is_empty() && differs.is_empty();
        if holds && held {
            return vmms_are(node, scenario, before);
        }
        held = holds;
        if begun.elapsed() > CONVERGES {
            let what = format!(
                "not as wanted in {CONVERGES:?}: {}\n    {}",
                waits.join("; "),
                differs.join("\n    ")
            );
            return Err(node.failed(&what));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

fn vmms_are(node: &Node, scenario: Scenario, before: &[u32]) -> Result<()> {
    let now = node.vmms();
    let holds = match scenario.after {
        Vmm::None => now.is_empty(),
        Vmm::Any => now.len() == 1,
        Vmm::Same => now.len() == 1 && now == before,
    };
    if holds {
        return Ok(());
    }
    let what = format!("VMMs {now:?}, before {before:?}, wanted {:?}", scenario.after);
    Err(node.failed(&what))
}

/// Waits until nothing is left.
async fn is_clear(node: &Node, wanted: &Census) -> Result<()> {
    let begun = Instant::now();
    loop {
        let left = Census::take(node.dir(), &node.registry(), Detail::Left)?.against(wanted);
        if left.is_empty() && node.vmms().is_empty() {
            return Ok(());
        }
        // A killed process is seen for a moment.
        if begun.elapsed() > Duration::from_secs(5) {
            let what = format!("after the deletion:\n    {}", left.join("\n    "));
            return Err(node.failed(&what));
        }
        tokio::time::sleep(PAUSE).await;
    }
}
