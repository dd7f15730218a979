//! The API over its real socket, on the reference drivers.

use std::{fmt::Write, time::Duration};

use conformance::reference::{Fault, Host, Op, When};
use drivers_api::{ArtifactKind, ErrorKind, Uuid};
use node_agent::{
    Agent, AgentError, Ended,
    api::{
        details,
        proto::{self, node_client::NodeClient},
    },
    config::Config,
};
use tempfile::TempDir;
use tokio::{sync::oneshot, task::JoinHandle, time::Instant};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Code,
    transport::{Channel, Endpoint},
};

use crate::common::volume;

type Client = NodeClient<Channel>;

/// An agent in this process, over a host in memory.
struct Here {
    host: Host,
    dir: TempDir,
    stop: Option<oneshot::Sender<()>>,
    agent: JoinHandle<Result<Ended, AgentError>>,
}

impl Here {
    async fn start() -> Self {
        let host = Host::new();
        host.publish_image(&"registry.test:5000/guest:1".parse().unwrap(), ArtifactKind::Kernel);
        Self::start_on(host, tempfile::tempdir().unwrap()).await
    }

    async fn start_on(host: Host, dir: TempDir) -> Self {
        let at = |name: &str| dir.path().join(name);
        let mut config = Config {
            socket: at("s"),
            state_dir: at("state"),
            run_dir: at("run"),
            node_id: Some(host.node()),
            ..Config::default()
        };
        config.capacity.cpu_overcommit = 1000.0;
        config.capacity.memory_overcommit = 1000.0;
        let agent = Agent::builder()
            .config(config)
            .hypervisor("reference", host.hypervisor())
            .network("reference", host.network())
            .volume("reference", host.volume())
            .image("reference", host.image())
            .without_built_in_drivers()
            .build()
            .await
            .unwrap();
        let (stop, stopped) = oneshot::channel();
        let agent = tokio::spawn(agent.run(async move { drop(stopped.await) }));
        Self { host, dir, stop: Some(stop), agent }
    }

    async fn client(&self) -> Client {
        let path = self.dir.path().join("s");
        let endpoint = Endpoint::try_from(format!("unix://{}", path.display())).unwrap();
        NodeClient::new(endpoint.connect().await.unwrap())
    }

    async fn end(mut self) -> (Host, TempDir) {
        self.stop.take().unwrap().send(()).unwrap();
        assert_eq!(self.agent.await.unwrap().unwrap(), Ended::Stopped);
        (self.host, self.dir)
    }
}

fn instance(name: &str) -> String {
    format!(
        "---\napi_version: bcd/v1\nkind: Instance\nname: {name}\nspec:\n  cpus: 1\n  memory_mib: 64\n  boot: {{kind: oci_image, ref: guest}}\n"
    )
}

const IMAGE: &str = "---\napi_version: bcd/v1\nkind: Image\nname: guest\nspec: {ref: 'registry.test:5000/guest:1'}\n";

async fn apply(client: &mut Client, manifests: String) -> Vec<proto::Accepted> {
    client.apply(proto::ApplyRequest { manifests }).await.unwrap().into_inner().objects
}

async fn list(client: &mut Client) -> Vec<proto::Object> {
    let mut stream = client.list(proto::ListRequest::default()).await.unwrap().into_inner();
    let mut objects = Vec::new();
    while let Some(object) = stream.message().await.unwrap() {
        objects.push(object);
    }
    objects
}

fn phase(object: &proto::Object) -> String {
    let status: serde_json::Value = serde_json::from_str(&object.status).unwrap();
    status["phase"].as_str().unwrap().to_owned()
}

/// Follows objects until all are gone or as wanted.
async fn settle(client: &mut Client, accepted: &[proto::Accepted]) {
    let watched =
        |one: &proto::Accepted| proto::Watched { key: one.key.clone(), uuid: one.uuid.clone() };
    let request = proto::WatchRequest { objects: accepted.iter().map(watched).collect() };
    let mut updates = client.watch(request).await.unwrap().into_inner();
    let mut open = accepted.len();
    let mut ready = std::collections::BTreeSet::new();
    while open > ready.len() {
        let update = tokio::time::timeout(Duration::from_secs(30), updates.message());
        let update = update.await.expect("in time").unwrap().expect("the watch goes on");
        let name = update.key.clone().unwrap().name;
        match &update.object {
            _ if update.gone => open -= 1,
            Some(object) if phase(object) == "Ready" => drop(ready.insert(name)),
            _ => drop(ready.remove(&name)),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_instances_come_up_and_get_stays_fast_while_one_call_hangs() {
    let here = Here::start().await;
    let mut client = here.client().await;
    let hung: Uuid = "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b".parse().unwrap();
    for op in [Op::EnsureVm, Op::CreateVm, Op::GetVm] {
        here.host.hang(op, Some(hung));
    }
    let mut manifests = IMAGE.to_owned();
    manifests
        .push_str(&instance("hung").replace("name: hung", &format!("name: hung\nuuid: {hung}")));
    for number in 0..199 {
        write!(manifests, "{}", instance(&format!("i{number}"))).unwrap();
    }
    let accepted = apply(&mut client, manifests).await;
    let well: Vec<_> =
        accepted.iter().filter(|one| one.key.as_ref().unwrap().name != "hung").cloned().collect();
    settle(&mut client, &well).await;
    let mut slowest = Duration::ZERO;
    for _ in 0..20 {
        let begun = Instant::now();
        let objects = list(&mut client).await;
        slowest = slowest.max(begun.elapsed());
        assert_eq!(objects.len(), 201);
        let waiting: Vec<_> = objects
            .iter()
            .filter(|one| phase(one) != "Ready")
            .map(|one| one.uuid.clone())
            .collect();
        assert_eq!(waiting, [hung.to_string()]);
    }
    // A build without optimisation on a loaded machine; what would fail is a list that waits for the call.
    assert!(slowest < Duration::from_millis(500), "{slowest:?}");
    here.host.release();
    here.host.heal();
    settle(&mut client, &accepted).await;
    here.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_apply_writes_nothing_on_the_host_and_a_restart_neither() {
    let here = Here::start().await;
    let mut client = here.client().await;
    let manifests = format!("{IMAGE}{}{}", volume("data", 1), instance("web"));
    let accepted = apply(&mut client, manifests.clone()).await;
    settle(&mut client, &accepted).await;
    let writes = here.host.writes();
    let again = apply(&mut client, manifests.clone()).await;
    assert!(again.iter().all(|one| one.change == "unchanged"), "{again:?}");
    let plan = client.plan(proto::PlanRequest { manifests: manifests.clone() }).await.unwrap();
    assert!(plan.into_inner().steps.is_empty());
    let (host, dir) = here.end().await;
    let here = Here::start_on(host, dir).await;
    let mut client = here.client().await;
    settle(&mut client, &accepted).await;
    assert_eq!(here.host.writes(), writes);
    here.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_is_deleted_and_applied_at_once_becomes_another_object() {
    let here = Here::start().await;
    let mut client = here.client().await;
    let first = apply(&mut client, volume("a", 1)).await;
    settle(&mut client, &first).await;
    let keys = vec![first[0].key.clone().unwrap()];
    client.delete(proto::DeleteRequest { keys: keys.clone() }).await.unwrap();
    let second = apply(&mut client, volume("a", 2)).await;
    settle(&mut client, &second).await;
    let objects = list(&mut client).await;
    assert_eq!((objects.len(), &objects[0].uuid), (1, &second[0].uuid));
    assert!(!objects[0].deleting);
    client.delete(proto::DeleteRequest { keys }).await.unwrap();
    settle(&mut client, &second).await;
    assert!(list(&mut client).await.is_empty());
    here.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_lost_store_left_on_the_host_is_kept_and_adopted_by_its_name() {
    let here = Here::start().await;
    let mut client = here.client().await;
    let manifests = format!("{IMAGE}{}{}", volume("data", 1), instance("web"));
    let accepted = apply(&mut client, manifests.clone()).await;
    settle(&mut client, &accepted).await;
    let (host, dir) = here.end().await;
    std::fs::remove_dir_all(dir.path().join("state")).unwrap();
    let writes = host.writes();
    let here = Here::start_on(host, dir).await;
    let mut client = here.client().await;
    assert!(list(&mut client).await.is_empty());
    let doctor = client.doctor(proto::DoctorRequest {}).await.unwrap().into_inner();
    let claims = doctor.checks.iter().find(|check| check.name == "claims").unwrap();
    assert!(claims.found.contains("web") && claims.found.contains("data"), "{claims:?}");
    let again = apply(&mut client, manifests).await;
    let identities = |list: &[proto::Accepted]| {
        list.iter()
            .filter(|one| one.key.as_ref().unwrap().kind != "Image")
            .map(|one| one.uuid.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(identities(&again), identities(&accepted));
    settle(&mut client, &again).await;
    assert_eq!(here.host.writes(), writes, "nothing was made a second time");
    here.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_hypervisor_destroys_nothing_and_get_still_answers() {
    let here = Here::start().await;
    let mut client = here.client().await;
    let accepted = apply(&mut client, format!("{IMAGE}{}", instance("web"))).await;
    settle(&mut client, &accepted).await;
    let (host, dir) = here.end().await;
    let writes = host.writes();
    for op in [Op::ListVms, Op::GetVm] {
        host.inject(Fault::new(op, ErrorKind::Unavailable).at(When::Before).for_ever());
    }
    let here = Here::start_on(host, dir).await;
    let mut client = here.client().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let objects = list(&mut client).await;
    assert_eq!(objects.len(), 2);
    assert_eq!(here.host.writes(), writes);
    here.host.heal();
    settle(&mut client, &accepted).await;
    assert_eq!(here.host.writes(), writes);
    here.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_carry_every_problem_for_programs() {
    let here = Here::start().await;
    let mut client = here.client().await;
    let manifests = format!("{}{}", volume("a", 0), volume("b", 1).replace("size_gib", "size"));
    let status = client.apply(proto::ApplyRequest { manifests }).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    let found = details(&status);
    let fields: Vec<_> = found.iter().map(|one| one.field.as_str()).collect();
    assert_eq!(fields, ["spec.size_gib", "spec.size"]);
    assert_eq!(found[1].remedy, "did you mean \"size_gib\"?");
    let key = Some(proto::Key { kind: "Volume".to_owned(), name: "nope".to_owned() });
    let status = client.get(proto::GetRequest { key }).await.unwrap_err();
    assert_eq!((status.code(), details(&status)[0].kind.as_str()), (Code::NotFound, "not-found"));
    here.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_console_shows_history_and_what_is_typed_reaches_the_guest() {
    let here = Here::start().await;
    let mut client = here.client().await;
    let accepted = apply(&mut client, format!("{IMAGE}{}", instance("web"))).await;
    settle(&mut client, &accepted).await;
    let (typed, input) = tokio::sync::mpsc::channel(4);
    let first =
        proto::ConsoleInput { name: "web".to_owned(), history: 1000, data: b"before".to_vec() };
    typed.send(first).await.unwrap();
    let mut output = client.console(ReceiverStream::new(input)).await.unwrap().into_inner();
    typed
        .send(proto::ConsoleInput { data: b" and \x1b[31m after".to_vec(), ..Default::default() })
        .await
        .unwrap();
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("before and \x1b[31m after") {
        let message = tokio::time::timeout(Duration::from_secs(10), output.message()).await;
        seen.extend(message.expect("in time").unwrap().expect("the console goes on").data);
    }
    drop(typed);
    while output.message().await.unwrap().is_some() {}
    let request = proto::LogsRequest { name: "web".to_owned(), bytes: 5 };
    let mut log = client.logs(request).await.unwrap().into_inner();
    assert_eq!(log.message().await.unwrap().unwrap().data, b"after");
    here.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn power_changes_and_reboots_are_done_once() {
    let here = Here::start().await;
    let mut client = here.client().await;
    let accepted = apply(&mut client, format!("{IMAGE}{}", instance("web"))).await;
    settle(&mut client, &accepted).await;
    let state = |object: &proto::Object| {
        let status: serde_json::Value = serde_json::from_str(&object.status).unwrap();
        status["observed"]["state"].as_str().unwrap_or_default().to_owned()
    };
    let key = accepted[1].key.clone();
    for (running, wanted) in [(false, "stopped"), (true, "running")] {
        let request = proto::SetPowerRequest { name: "web".to_owned(), running };
        client.set_power(request).await.unwrap();
        loop {
            let object =
                client.get(proto::GetRequest { key: key.clone() }).await.unwrap().into_inner();
            if state(&object) == wanted && phase(&object) == "Ready" {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    let before = here.host.calls(Op::RebootVm);
    client.reboot(proto::RebootRequest { name: "web".to_owned() }).await.unwrap();
    loop {
        let object = client.get(proto::GetRequest { key: key.clone() }).await.unwrap().into_inner();
        if object.pending_requests == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(here.host.calls(Op::RebootVm), before + 1);
    here.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_are_told_live_and_the_health_service_answers() {
    let here = Here::start().await;
    let mut client = here.client().await;
    let request = proto::EventsRequest { follow: true, history: 1 };
    let mut events = client.events(request).await.unwrap().into_inner();
    apply(&mut client, volume("a", 1)).await;
    let mut kinds = Vec::new();
    let told = |kinds: &[String], kind: &str| kinds.iter().any(|one| one == kind);
    while !(told(&kinds, "step") && told(&kinds, "accepted")) {
        let event = tokio::time::timeout(Duration::from_secs(10), events.message()).await;
        kinds.push(event.expect("in time").unwrap().expect("the stream goes on").kind);
    }
    let path = here.dir.path().join("s");
    let endpoint = Endpoint::try_from(format!("unix://{}", path.display())).unwrap();
    let mut health =
        tonic_health::pb::health_client::HealthClient::new(endpoint.connect().await.unwrap());
    let request = tonic_health::pb::HealthCheckRequest { service: "bcd.node.v1.Node".to_owned() };
    let answer = health.check(request).await.unwrap().into_inner();
    assert_eq!(
        answer.status,
        i32::from(tonic_health::pb::health_check_response::ServingStatus::Serving as u8)
    );
    // An open stream does not hold up the end of the agent.
    let begun = Instant::now();
    here.end().await;
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
}
