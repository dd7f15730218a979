//! The calls: credentials first, then the node, then the answer's form.

use drivers_api::VmPower;
use futures_util::{Stream, StreamExt, stream};
use reconciler::wanted::{Kind, ObjectName};
use tokio::sync::watch;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::{
    convert::{self, faults_of, invalid, read_key},
    peer::writer,
    proto::{self, node_server},
    streams,
};
use crate::{
    accept::Deletion,
    doctor, inventory,
    node::{Node, not_found},
};

/// A stream of answers.
pub(super) type Answers<T> = std::pin::Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

pub(super) struct Service {
    node: Node,
    stop: watch::Receiver<bool>,
}

impl Service {
    pub(super) const fn new(node: Node, stop: watch::Receiver<bool>) -> Self {
        Self { node, stop }
    }

    /// Ends a stream when the agent stops.
    fn until_stop<T: Send + 'static>(
        &self,
        answers: impl Stream<Item = Result<T, Status>> + Send + 'static,
    ) -> Answers<T> {
        let mut stop = self.stop.clone();
        let ended = async move {
            // An error: the agent is gone.
            drop(stop.wait_for(|stop| *stop).await);
        };
        Box::pin(answers.take_until(Box::pin(ended)))
    }

    fn instance(name: &str) -> Result<ObjectName, Status> {
        name.parse().map_err(|error| invalid("name", error))
    }
}

#[tonic::async_trait]
impl node_server::Node for Service {
    type ListStream = Answers<proto::Object>;
    type WatchStream = Answers<proto::WatchUpdate>;
    type EventsStream = Answers<proto::Event>;
    type ConsoleStream = Answers<proto::ConsoleOutput>;
    type LogsStream = Answers<proto::Chunk>;
    type PullImageStream = Answers<proto::PullUpdate>;

    async fn apply(
        &self,
        request: Request<proto::ApplyRequest>,
    ) -> Result<Response<proto::ApplyResponse>, Status> {
        let peer = writer(&request, "apply manifests to")?;
        let accepted = self.node.apply(&request.get_ref().manifests).await.map_err(faults_of)?;
        for one in accepted.iter().filter(|one| one.change != crate::accept::Change::Unchanged) {
            tracing::info!(uid = peer.uid, object = %one.key, uuid = %one.uuid, generation = one.generation, change = one.change.as_str(), "accepted");
        }
        let objects = accepted.iter().map(convert::accepted).collect();
        Ok(Response::new(proto::ApplyResponse { objects }))
    }

    async fn delete(
        &self,
        request: Request<proto::DeleteRequest>,
    ) -> Result<Response<proto::DeleteResponse>, Status> {
        let peer = writer(&request, "delete objects of")?;
        let keys: Vec<_> = request
            .get_ref()
            .keys
            .iter()
            .map(|key| read_key(Some(key)))
            .collect::<Result<_, _>>()?;
        let answers = self.node.delete(&keys).await.map_err(faults_of)?;
        let marked = |deletion: &Deletion| matches!(deletion, Deletion::Deleting(_));
        for (key, _) in answers.iter().filter(|(_, deletion)| marked(deletion)) {
            tracing::info!(uid = peer.uid, object = %key, "marked for deletion");
        }
        let objects = answers.iter().map(convert::deleted).collect();
        Ok(Response::new(proto::DeleteResponse { objects }))
    }

    async fn get(
        &self,
        request: Request<proto::GetRequest>,
    ) -> Result<Response<proto::Object>, Status> {
        let key = read_key(request.get_ref().key.as_ref())?;
        let object = self.node.get(&key).ok_or_else(|| faults_of(not_found(&key)))?;
        convert::object(&self.node, &object).map(Response::new)
    }

    async fn list(
        &self,
        request: Request<proto::ListRequest>,
    ) -> Result<Response<Self::ListStream>, Status> {
        let kind = match request.get_ref().kind.as_str() {
            "" => None,
            text => Some(text.parse::<Kind>().map_err(|error| invalid("kind", error))?),
        };
        let node = self.node.clone();
        let objects =
            stream::iter(self.node.list(kind)).map(move |object| convert::object(&node, &object));
        Ok(Response::new(self.until_stop(objects)))
    }

    async fn describe(
        &self,
        request: Request<proto::GetRequest>,
    ) -> Result<Response<proto::Description>, Status> {
        let key = read_key(request.get_ref().key.as_ref())?;
        let object = self.node.get(&key).ok_or_else(|| faults_of(not_found(&key)))?;
        let object = convert::object(&self.node, &object)?;
        let (steps, plan_error) = match self.node.pending(&key).await {
            Ok(steps) => (streams::json_lines(&steps)?, String::new()),
            Err(faults) => (Vec::new(), faults.to_string()),
        };
        let (events, _) = self.node.events().since(20, |event| event.key.as_ref() == Some(&key));
        let events = events.iter().map(|event| convert::event(event)).collect();
        let description = proto::Description { object: Some(object), steps, plan_error, events };
        Ok(Response::new(description))
    }

    async fn plan(
        &self,
        request: Request<proto::PlanRequest>,
    ) -> Result<Response<proto::PlanResponse>, Status> {
        let (steps, accepted) =
            self.node.plan(&request.get_ref().manifests).await.map_err(faults_of)?;
        let steps = streams::json_lines(&steps)?;
        let objects = accepted.iter().map(convert::accepted).collect();
        Ok(Response::new(proto::PlanResponse { steps, objects }))
    }

    async fn set_power(
        &self,
        request: Request<proto::SetPowerRequest>,
    ) -> Result<Response<proto::Accepted>, Status> {
        let peer = writer(&request, "change the power of instances of")?;
        let name = Self::instance(&request.get_ref().name)?;
        let running = request.get_ref().running;
        let power = if running { VmPower::Running } else { VmPower::Stopped };
        let accepted = self.node.set_power(&name, power).await.map_err(faults_of)?;
        tracing::info!(uid = peer.uid, instance = %name, running, "power asked for");
        Ok(Response::new(convert::accepted(&accepted)))
    }

    async fn reboot(
        &self,
        request: Request<proto::RebootRequest>,
    ) -> Result<Response<proto::Accepted>, Status> {
        let peer = writer(&request, "reboot instances of")?;
        let name = Self::instance(&request.get_ref().name)?;
        let accepted = self.node.reboot(&name).await.map_err(faults_of)?;
        tracing::info!(uid = peer.uid, instance = %name, "reboot asked for");
        Ok(Response::new(convert::accepted(&accepted)))
    }

    async fn watch(
        &self,
        request: Request<proto::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let updates = streams::watch(&self.node, &request.get_ref().objects)?;
        Ok(Response::new(self.until_stop(ReceiverStream::new(updates))))
    }

    async fn events(
        &self,
        request: Request<proto::EventsRequest>,
    ) -> Result<Response<Self::EventsStream>, Status> {
        let answers = streams::events(&self.node, request.get_ref());
        Ok(Response::new(self.until_stop(answers)))
    }

    async fn console(
        &self,
        request: Request<Streaming<proto::ConsoleInput>>,
    ) -> Result<Response<Self::ConsoleStream>, Status> {
        let peer = writer(&request, "open a console of")?;
        let output = streams::console(&self.node, request.into_inner(), peer.uid).await?;
        Ok(Response::new(self.until_stop(ReceiverStream::new(output))))
    }

    async fn logs(
        &self,
        request: Request<proto::LogsRequest>,
    ) -> Result<Response<Self::LogsStream>, Status> {
        writer(&request, "read a console log of")?;
        let chunks = streams::logs(&self.node, request.get_ref()).await?;
        Ok(Response::new(self.until_stop(chunks)))
    }

    async fn pull_image(
        &self,
        request: Request<proto::PullImageRequest>,
    ) -> Result<Response<Self::PullImageStream>, Status> {
        let peer = writer(&request, "pull images to")?;
        let reference = request.get_ref().reference.clone();
        let updates = streams::pull(&self.node, request.get_ref())?;
        tracing::info!(uid = peer.uid, reference, "pull asked for");
        Ok(Response::new(self.until_stop(ReceiverStream::new(updates))))
    }

    async fn list_drivers(
        &self,
        request: Request<proto::ListDriversRequest>,
    ) -> Result<Response<proto::ListDriversResponse>, Status> {
        let kind = request.get_ref().kind.as_str();
        if !kind.is_empty() && !inventory::KINDS.contains(&kind) {
            let reason = format!("wanted one of {}", inventory::KINDS.join(", "));
            return Err(invalid("kind", reason));
        }
        let drivers = inventory::drivers(self.node.drivers()).await;
        let drivers = drivers
            .into_iter()
            .filter(|driver| kind.is_empty() || driver.kind == kind)
            .map(|driver| proto::Driver {
                kind: driver.kind.to_owned(),
                id: driver.id,
                is_default: driver.is_default,
                backend: driver.backend,
                abilities: driver.abilities.to_string(),
                error: driver.error.unwrap_or_default(),
            })
            .collect();
        Ok(Response::new(proto::ListDriversResponse { drivers }))
    }

    async fn doctor(
        &self,
        _request: Request<proto::DoctorRequest>,
    ) -> Result<Response<proto::DoctorResponse>, Status> {
        let checks = doctor::of_node(&self.node).await;
        let checks = checks
            .into_iter()
            .map(|check| proto::Check {
                name: check.name,
                verdict: check.verdict.as_str().to_owned(),
                found: check.found,
                remedy: check.remedy,
            })
            .collect();
        Ok(Response::new(proto::DoctorResponse { checks }))
    }
}
