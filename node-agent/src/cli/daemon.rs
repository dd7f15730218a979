//! `bcd-node run`.

use tokio::signal::unix::{SignalKind, signal};

use super::{CliError, Done, args, exit, output::Out};
use crate::{
    Agent, AgentError, Ended,
    api::ServeError,
    config::{Config, DEFAULT_TEXT},
    logging,
    store::OpenError,
};

pub(crate) async fn run(args: args::Run) -> Done {
    if args.print_default_config {
        let printed = Out::new().bytes(DEFAULT_TEXT.as_bytes());
        return printed.map(|()| exit::OK).map_err(|error| CliError::chain(exit::ERROR, &error));
    }
    let config = Config::load(args.config.as_deref())
        .map_err(|error| CliError::chain(exit::ERROR, &error))?;
    logging::start(&config.log).map_err(|error| CliError::chain(exit::ERROR, &error))?;
    // Before anything is opened: a signal during the start ends it in order.
    let fail = |error: std::io::Error| CliError::chain(exit::ERROR, &error);
    let mut terminate = signal(SignalKind::terminate()).map_err(fail)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(fail)?;
    let mut builder = Agent::builder().config(config);
    if args.drivers == Some(args::DriverSet::Reference) {
        builder = builder.with_reference_drivers();
    }
    let ended = async {
        let agent = builder.build().await?;
        let stop = async move {
            tokio::select! {
                _ = terminate.recv() => tracing::info!("SIGTERM"),
                _ = interrupt.recv() => tracing::info!("SIGINT"),
            }
        };
        agent.run(stop).await
    };
    match ended.await {
        Ok(Ended::Stopped) => Ok(exit::OK),
        Ok(Ended::ReadOnly(trouble)) => {
            Err(CliError::with_code(exit::READ_ONLY, trouble.to_string()))
        }
        Err(error) => Err(CliError::chain(code_of(&error), &error)),
    }
}

const fn code_of(error: &AgentError) -> u8 {
    match error {
        AgentError::Store(OpenError::InUse { .. })
        | AgentError::Serve(ServeError::InUse(_))
        | AgentError::Lost(_) => exit::IN_USE,
        AgentError::NodeId(_)
        | AgentError::Store(_)
        | AgentError::Driver(_)
        | AgentError::Serve(_)
        | AgentError::RunDir { .. } => exit::ERROR,
    }
}
