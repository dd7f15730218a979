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
    _dir: TempDir,
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
            if tokio::time::timeout(START_LIMIT, registry.answers()).await.is_ok_and(|there| there)
            {
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
        let config = dir.path().join("config.yml");
        let text = format!(
            "version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\nstorage:\n  filesystem: {{rootdirectory: \
             {}}}\n  delete: {{enabled: true}}\nhttp:\n  addr: 127.0.0.1:{port}\n",
            storage.display()
        );
        files::write_new(&config, text.as_bytes()).map_err(io::Error::other)?;
        let log = files::create_new(&dir.path().join("log")).map_err(io::Error::other)?;
        let process = Daemon::new("setpriv")
            .args(["--pdeathsig", "KILL", "docker-registry", "serve"])
            .arg(config)
            .log(log)
            .start()?;
        Ok(Self { port, process, _dir: dir })
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

/// A loopback port that nobody listens on at this moment.
fn free_port() -> io::Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
