//! Debian's `docker-registry`, started for a test.

use std::{io, time::Duration};

use host::{
    daemon::{Daemon, Started},
    files,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncWriteExt, BufReader},
    net::TcpStream,
};

use super::{
    artifact::{Artifact, Manifest, digest_of},
    wire::{Head, read_body, read_head},
};

/// How long the registry may take until it answers. It starts in 0.1 s on an idle machine.
const START_LIMIT: Duration = Duration::from_secs(20);

/// A real registry on a loopback port. Its process ends and its storage goes when it is dropped.
#[derive(Debug)]
pub struct RealRegistry {
    port: u16,
    process: Started,
    dir: TempDir,
}

impl Drop for RealRegistry {
    fn drop(&mut self) {
        // Failure means that it is gone already.
        drop(self.process.pidfd.signal(rustix::process::Signal::KILL));
    }
}

impl RealRegistry {
    /// Starts one and waits until it answers.
    ///
    /// The registry is told to end with the thread that starts it, so that a test that is killed leaves none behind.
    ///
    /// # Errors
    /// When `docker-registry` or `setpriv` is missing, or it does not answer in time.
    pub async fn start() -> io::Result<Self> {
        // The registry takes no socket by descriptor, so another program may take the port first: then again.
        for _ in 0..4 {
            let registry = Self::start_on(free_port()?)?;
            if registry.came_up().await {
                return Ok(registry);
            }
        }
        Err(io::Error::other(
            "docker-registry does not answer on its loopback port; is the package installed?",
        ))
    }

    fn start_on(port: u16) -> io::Result<Self> {
        let dir = tempfile::tempdir()?;
        let storage = dir.path().join("storage");
        let text = format!(
            "version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\nstorage:\n  filesystem: {{rootdirectory: \
             {}}}\n  delete: {{enabled: true}}\nhttp:\n  addr: 127.0.0.1:{port}\n",
            storage.display()
        );
        files::write_new(&dir.path().join("config.yml"), text.as_bytes())
            .map_err(io::Error::other)?;
        let process = spawn(&dir)?;
        Ok(Self { port, process, dir })
    }

    /// Ends the process; what was pushed stays.
    ///
    /// # Errors
    /// When it cannot be ended.
    pub async fn stop(&self) -> io::Result<()> {
        self.process.pidfd.signal(rustix::process::Signal::KILL)?;
        self.process.pidfd.ended().await.map(drop)
    }

    /// Starts it again on the same port with what was pushed.
    ///
    /// # Errors
    /// When it does not answer in time.
    pub async fn start_again(&mut self) -> io::Result<()> {
        self.process = spawn(&self.dir)?;
        if self.came_up().await {
            return Ok(());
        }
        Err(io::Error::other("docker-registry does not answer again on its port"))
    }

    async fn came_up(&self) -> bool {
        tokio::time::timeout(START_LIMIT, self.answers()).await.is_ok_and(|there| there)
    }

    /// Waits until the registry answers; `false` when its process ended first.
    async fn answers(&self) -> bool {
        let mut pause = tokio::time::interval(Duration::from_millis(20));
        loop {
            if self.process.pidfd.has_ended() {
                return false;
            }
            if self.request("GET", "/v2/", "", &[]).await.is_ok_and(|head| head.word(1) == "200") {
                return true;
            }
            // The registry tells nobody when it is ready.
            pause.tick().await;
        }
    }

    /// `127.0.0.1:PORT`.
    #[must_use]
    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Pushes an artifact under a tag; answers the manifest's digest.
    ///
    /// # Errors
    /// When the registry refuses a part.
    pub async fn push(
        &self,
        repository: &str,
        tag: &str,
        artifact: &Artifact,
    ) -> io::Result<String> {
        for blob in artifact.blobs() {
            self.push_blob(repository, &blob.bytes).await?;
        }
        self.push_manifest(repository, tag, &artifact.manifest()).await
    }

    /// Pushes a blob; answers its digest.
    ///
    /// # Errors
    /// When the registry refuses it.
    pub async fn push_blob(&self, repository: &str, bytes: &[u8]) -> io::Result<String> {
        let digest = digest_of(bytes);
        let path = format!("/v2/{repository}/blobs/{digest}");
        if self.request("HEAD", &path, "", &[]).await?.word(1) == "200" {
            return Ok(digest);
        }
        let path = format!("/v2/{repository}/blobs/uploads/");
        let begun = expect(self.request("POST", &path, "", &[]).await?, "202")?;
        let location = begun.header("location").unwrap_or_default();
        let origin = format!("http://{}", self.host());
        let path = location.strip_prefix(&origin).unwrap_or(location);
        let sign = if path.contains('?') { '&' } else { '?' };
        let path = format!("{path}{sign}digest={digest}");
        let sent = self.request("PUT", &path, "application/octet-stream", bytes).await?;
        expect(sent, "201")?;
        Ok(digest)
    }

    /// Pushes a manifest or index under a tag or its digest; answers its digest.
    ///
    /// # Errors
    /// When the registry refuses it.
    pub async fn push_manifest(
        &self,
        repository: &str,
        name: &str,
        manifest: &Manifest,
    ) -> io::Result<String> {
        let path = format!("/v2/{repository}/manifests/{name}");
        let sent = self.request("PUT", &path, &manifest.media_type, &manifest.bytes).await?;
        expect(sent, "201")?;
        Ok(manifest.digest())
    }

    async fn request(&self, method: &str, path: &str, kind: &str, body: &[u8]) -> io::Result<Head> {
        let mut stream = BufReader::new(TcpStream::connect(("127.0.0.1", self.port)).await?);
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            self.host(),
            body.len()
        );
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(body).await?;
        stream.flush().await?;
        let gone = || io::Error::other("the registry closed the connection without an answer");
        let answer = read_head(&mut stream).await?.ok_or_else(gone)?;
        if method != "HEAD" {
            read_body(&mut stream, &answer).await?;
        }
        Ok(answer)
    }
}

fn expect(answer: Head, status: &str) -> io::Result<Head> {
    if answer.word(1) == status {
        return Ok(answer);
    }
    Err(io::Error::other(format!("the registry answered {:?}, wanted {status}", answer.words)))
}

fn spawn(dir: &TempDir) -> io::Result<Started> {
    let log = std::fs::OpenOptions::new().append(true).create(true).open(dir.path().join("log"))?;
    Daemon::new("setpriv")
        .args(["--pdeathsig", "KILL", "docker-registry", "serve"])
        .arg(dir.path().join("config.yml"))
        .log(log)
        .start()
}

/// A loopback port that nobody listens on at this moment.
fn free_port() -> io::Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
