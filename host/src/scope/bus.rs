//! A connection to the service manager: the handshake, calls and signals.

use std::{io, path::Path};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

use super::wire::{self, Call, FIXED_HEADER, Message};

/// The system bus. The manager's interface there is stable.
const SYSTEM_BUS: &str = "/run/dbus/system_bus_socket";
/// The manager's own socket, the same interface for root without a bus between: for hosts that have no bus, or not yet.
const PRIVATE: &str = "/run/systemd/private";

pub(super) const MANAGER: &str = "org.freedesktop.systemd1";
const MANAGER_PATH: &str = "/org/freedesktop/systemd1";
const MANAGER_INTERFACE: &str = "org.freedesktop.systemd1.Manager";
const BUS: &str = "org.freedesktop.DBus";
const BUS_PATH: &str = "/org/freedesktop/DBus";

/// A call's outcome: its first text, or the error's name and text.
pub(super) type Answer = Result<String, (String, String)>;

#[derive(Debug)]
pub(super) struct Manager {
    stream: UnixStream,
    serial: u32,
    /// Signals that came while an answer was waited for.
    signals: Vec<(String, Vec<String>)>,
}

impl Manager {
    /// Connects, and asks for the manager's signals.
    pub(super) async fn connect() -> io::Result<Self> {
        let (stream, bus) = match UnixStream::connect(Path::new(SYSTEM_BUS)).await {
            Ok(stream) => (stream, true),
            Err(error) => {
                tracing::debug!(%error, "no system bus; trying the manager's own socket");
                (UnixStream::connect(Path::new(PRIVATE)).await?, false)
            }
        };
        let mut manager = Self { stream, serial: 0, signals: Vec::new() };
        manager.authenticate().await?;
        if bus {
            let mut rule = wire::Writer::default();
            rule.text(&format!("type='signal',sender='{MANAGER}',path='{MANAGER_PATH}'"));
            let rule = rule.into_bytes();
            for (member, body) in [("Hello", ("", Vec::new())), ("AddMatch", ("s", rule))] {
                let call = Call { destination: BUS, path: BUS_PATH, interface: BUS, member, body };
                manager.call(call).await?.map_err(refused)?;
            }
            manager.ask("Subscribe", ("", Vec::new())).await?.map_err(refused)?;
        }
        Ok(manager)
    }

    /// "Authentication Protocol" of the specification, with the mechanism EXTERNAL: the kernel says who we are.
    async fn authenticate(&mut self) -> io::Result<()> {
        let uid = rustix::process::geteuid().as_raw().to_string();
        let hex: String = uid.bytes().map(|byte| format!("{byte:02x}")).collect();
        self.stream.write_all(format!("\0AUTH EXTERNAL {hex}\r\n").as_bytes()).await?;
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            if line.len() > 512 {
                return Err(broken("the answer to the authentication has no end"));
            }
            line.push(self.stream.read_u8().await?);
        }
        if !line.starts_with(b"OK ") {
            let text = String::from_utf8_lossy(&line).trim().escape_default().to_string();
            return Err(broken(&format!("the authentication was answered by {text}")));
        }
        self.stream.write_all(b"BEGIN\r\n").await
    }

    /// Calls a method of the manager.
    pub(super) async fn ask(&mut self, member: &str, body: (&str, Vec<u8>)) -> io::Result<Answer> {
        let (path, interface) = (MANAGER_PATH, MANAGER_INTERFACE);
        self.call(Call { destination: MANAGER, path, interface, member, body }).await
    }

    async fn call(&mut self, call: Call<'_>) -> io::Result<Answer> {
        self.serial += 1;
        let serial = self.serial;
        self.stream.write_all(&call.marshal(serial)).await?;
        loop {
            match self.read().await? {
                Message::Return(to, text) if to == serial => return Ok(Ok(text)),
                Message::Error(to, name, text) if to == serial => return Ok(Err((name, text))),
                Message::Signal(name, texts) => self.signals.push((name, texts)),
                Message::Return(..) | Message::Error(..) | Message::Other => {}
            }
        }
    }

    /// Waits for a signal of this name for which `is_it` answers; those that came before count.
    pub(super) async fn signal<T>(
        &mut self,
        name: &str,
        is_it: impl Fn(&[String]) -> Option<T>,
    ) -> io::Result<T> {
        let early = std::mem::take(&mut self.signals);
        let mut early = early.iter().filter(|(found, _)| found == name);
        if let Some(found) = early.find_map(|(_, texts)| is_it(texts)) {
            return Ok(found);
        }
        loop {
            if let Message::Signal(found, texts) = self.read().await?
                && found == name
                && let Some(found) = is_it(&texts)
            {
                return Ok(found);
            }
        }
    }

    async fn read(&mut self) -> io::Result<Message> {
        let mut fixed = [0; FIXED_HEADER];
        self.stream.read_exact(&mut fixed).await?;
        let length = wire::length(&fixed).ok_or_else(|| broken("a message has a wrong length"))?;
        let mut bytes = fixed.to_vec();
        bytes.resize(length, 0);
        if let Some(rest) = bytes.get_mut(FIXED_HEADER..) {
            self.stream.read_exact(rest).await?;
        }
        wire::parse(&bytes).ok_or_else(|| broken("a message breaks the format"))
    }
}

fn broken(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn refused((name, text): (String, String)) -> io::Error {
    io::Error::other(format!("{name}: {text}"))
}
