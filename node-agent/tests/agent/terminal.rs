//! The console on a real terminal, which is as it was when the session ends, however it ends.

use std::{
    fs::File,
    io::{Read, Write},
    os::fd::OwnedFd,
    time::Duration,
};

use host::{
    daemon::{Daemon, Started},
    process::Ended,
};
use rustix::{
    fs::{Mode, OFlags, fcntl_setfl},
    process::Signal,
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, OutputModes, Termios, tcgetattr},
};
use tokio::time::Instant;

use crate::common::{BIN, Place};

const INSTANCE: &str = "api_version: bcd/v1\nkind: Instance\nname: web\nspec:\n  cpus: 1\n  memory_mib: 64\n  \
    boot: {kind: direct_linux, ref: /boot/guest}\n";

/// A console session whose terminal is a pty: we are the person at its other end.
struct Session {
    person: File,
    shown: String,
    before: Termios,
    client: Started,
}

/// What a program sees of a terminal.
fn modes(terminal: &Termios) -> String {
    let Termios { input_modes, output_modes, control_modes, local_modes, special_codes, .. } =
        terminal;
    format!("{input_modes:?} {output_modes:?} {control_modes:?} {local_modes:?} {special_codes:?}")
}

impl Session {
    async fn open(place: &Place) -> Self {
        let person =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&person).unwrap();
        unlockpt(&person).unwrap();
        let name = ptsname(&person, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let terminal: OwnedFd = rustix::fs::open(name, flags, Mode::empty()).unwrap();
        let before = tcgetattr(&terminal).unwrap();
        assert!(before.local_modes.contains(LocalModes::ICANON | LocalModes::ECHO), "{before:?}");
        fcntl_setfl(&person, OFlags::RDWR | OFlags::NONBLOCK).unwrap();
        // The terminal is not the session's controlling one: keys are bytes, and signals are sent by hand.
        let mut daemon = Daemon::new("sh");
        let fd = daemon.pass(terminal);
        let script = format!("exec \"$0\" \"$@\" <&{fd} >&{fd} 2>&{fd}");
        let daemon =
            daemon.args(["-c", &script, BIN, "--socket", &place.text("s"), "console", "web"]);
        let client = daemon.start().unwrap();
        let mut this = Self { person: File::from(person), shown: String::new(), before, client };
        this.sees("Ctrl-] ends the session").await;
        this.becomes("raw", |now| {
            !now.local_modes.intersects(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
                && !now.output_modes.contains(OutputModes::OPOST)
        })
        .await;
        this
    }

    /// Takes what is shown until `text` is.
    async fn sees(&mut self, text: &str) {
        let begun = Instant::now();
        let mut buffer = [0; 4096];
        while !self.shown.contains(text) {
            match self.person.read(&mut buffer) {
                Ok(read) => self.shown.push_str(&String::from_utf8_lossy(&buffer[..read])),
                // EIO: nobody has the other end open.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "no {text:?} in {:?}", self.shown);
        }
    }

    async fn becomes(&self, what: &str, is_so: impl Fn(&Termios) -> bool) {
        let begun = Instant::now();
        loop {
            let now = tcgetattr(&self.person).unwrap();
            if is_so(&now) {
                return;
            }
            assert!(
                begun.elapsed() < Duration::from_secs(20),
                "the terminal is not {what}: {now:?}"
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn types(&mut self, keys: &[u8]) {
        self.person.write_all(keys).unwrap();
    }

    /// Waits for the end of the session: its code, with the terminal as it was before.
    async fn ended(&mut self) -> i32 {
        let ended = self.client.pidfd.ended_within(Duration::from_secs(20)).await.unwrap();
        let now = tcgetattr(&self.person).unwrap();
        assert_eq!(modes(&now), modes(&self.before), "the terminal is not restored");
        match ended {
            Some(Ended::Code(code)) => code,
            other => panic!("the session ended as {other:?}: {}", self.shown),
        }
    }
}

#[tokio::test]
async fn the_terminal_is_restored_by_the_escape_key_by_sigterm_and_when_the_agent_dies() {
    let place = Place::reference("");
    let agent = place.start().await;
    place.feed(&["apply", "-f", "-", "--wait=20"], INSTANCE).await.expect(0);

    // What is typed goes to the guest, which the reference driver has answer with the same; keys that make signals too.
    let mut session = Session::open(&place).await;
    session.types(b"hello\x03 guest");
    session.sees("hello\x03 guest").await;
    session.types(b"last\x1dnot this");
    assert_eq!(session.ended().await, 0);
    session.sees("the console session has ended").await;

    let mut session = Session::open(&place).await;
    session.types(b"again");
    session.sees("again").await;
    session.client.pidfd.signal(Signal::TERM).unwrap();
    assert_eq!(session.ended().await, 0);

    let mut session = Session::open(&place).await;
    agent.kill().await;
    assert_eq!(session.ended().await, 1);
    session.sees("the console session has ended").await;

    let agent = place.start().await;
    let log = place.cli(&["logs", "web"]).await;
    assert!(!log.out.contains("not this"), "what follows the escape key is not sent: {log:?}");
    assert_eq!(agent.stop().await, 0);
}
