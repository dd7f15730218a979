//! The console of the reference hypervisor: the guest echoes what it is sent.

use async_trait::async_trait;
use drivers_api::{BoxFuture, Console, ConsoleStream, Context, ErrorKind, Result, VmId};

use super::{
    Op,
    host::{Host, refuse},
    hypervisor::ReferenceHypervisor,
};

struct Stream {
    host: Host,
    vm: VmId,
    pid: u32,
    /// How many of the bytes that the guest wrote in all were read.
    at: u64,
}

impl Stream {
    /// What is new; `None` while there is nothing; empty when the console is gone.
    fn poll(&mut self) -> Option<Vec<u8>> {
        let state = self.host.lock();
        let Some(machine) = state.machines.vms.get(&self.vm) else { return Some(Vec::new()) };
        let bytes = machine.console.since(self.at);
        self.at = machine.console.written;
        let gone = machine.run.as_ref().is_none_or(|run| run.pid != self.pid);
        (gone || !bytes.is_empty()).then_some(bytes)
    }
}

impl ConsoleStream for Stream {
    fn read(&mut self) -> BoxFuture<'_, Result<Vec<u8>>> {
        Box::pin(async move {
            let mut changes = self.host.changes();
            loop {
                if let Some(bytes) = self.poll() {
                    return Ok(bytes);
                }
                // The sender lives as long as the host, which this stream holds.
                if changes.changed().await.is_err() {
                    return Ok(Vec::new());
                }
            }
        })
    }

    fn write<'a>(&'a mut self, bytes: &'a [u8]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            if self.host.guest_writes(self.vm, bytes) {
                return Ok(());
            }
            let object = format!("console of vm {}", self.vm);
            Err(refuse(ErrorKind::Unavailable, Op::OpenConsole, object, "the VM does not run"))
        })
    }
}

#[async_trait]
impl Console for ReferenceHypervisor {
    async fn open_console(
        &self,
        cx: &Context,
        vm: VmId,
        history: usize,
    ) -> Result<Box<dyn ConsoleStream>> {
        let op = Op::OpenConsole;
        let call = self.host.begin(cx, op, Some(vm.uuid())).await?;
        let found = self.look(op, vm, |_, machine| {
            Ok((machine.run.as_ref().map(|run| run.pid), machine.console.written))
        })?;
        let object = format!("console of vm {vm}");
        let (pid, at) = match found {
            None => return Err(refuse(ErrorKind::NotFound, op, object, "there is no such VM")),
            Some((None, _)) => {
                return Err(refuse(ErrorKind::Unavailable, op, object, "the VM does not run"));
            }
            Some((Some(pid), written)) => {
                (pid, written.saturating_sub(u64::try_from(history).unwrap_or(u64::MAX)))
            }
        };
        let stream: Box<dyn ConsoleStream> =
            Box::new(Stream { host: self.host.clone(), vm, pid, at });
        call.end(stream).await
    }

    async fn console_log(&self, cx: &Context, vm: VmId, bytes: usize) -> Result<Vec<u8>> {
        let op = Op::ConsoleLog;
        let call = self.host.begin(cx, op, Some(vm.uuid())).await?;
        let log = self.look(op, vm, |_, machine| {
            let from = machine.console.written;
            Ok(machine.console.since(from.saturating_sub(u64::try_from(bytes).unwrap_or(u64::MAX))))
        })?;
        let object = format!("console of vm {vm}");
        let log =
            log.ok_or_else(|| refuse(ErrorKind::NotFound, op, object, "there is no such VM"))?;
        call.end(log).await
    }
}
