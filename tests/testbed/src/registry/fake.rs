//! A registry that does as it is told.

use std::{
    collections::{BTreeMap, HashMap},
    fmt, io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader},
    net::TcpListener,
    sync::watch,
    task::JoinSet,
    time::Instant,
};
use tokio_rustls::{TlsAcceptor, rustls};

use super::{
    artifact::{Artifact, Layout, Manifest, digest_of},
    wire::{Head, read_body, read_head},
};

/// The pieces in which a throttled body is sent.
const PIECE: usize = 16 << 10;

/// What is answered instead of the stored object.
#[derive(Clone, Debug)]
pub enum Reply {
    /// These bytes as they are, then the connection is closed. `@PORT@` is replaced by the own port and `@SELF@` by the
    /// request's own path.
    Raw(String),
    /// The stored object, but the connection is closed after so many bytes of its body.
    Cut(usize),
    /// The stored object, with an additional header.
    WithHeader(&'static str, String),
    /// Nothing, for ever.
    Silence,
    /// A full answer (200) even when a range was asked for.
    IgnoreRange,
}

#[derive(Debug)]
struct Rule {
    needle: String,
    left: usize,
    reply: Reply,
}

/// A request that was seen.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The method.
    pub method: String,
    /// Path and query.
    pub path: String,
    /// The headers by lower-case name.
    pub headers: BTreeMap<String, String>,
    /// When it came.
    pub at: Instant,
}

#[derive(Debug, Default)]
struct Stored {
    blobs: HashMap<String, Arc<Vec<u8>>>,
    manifests: HashMap<(String, String), Manifest>,
    files: HashMap<String, Arc<Vec<u8>>>,
    rules: Vec<Rule>,
    seen: Vec<Seen>,
    bytes_per_second: Option<u64>,
    sent: u64,
    basic: Option<String>,
}

/// The registry. It ends when it is dropped.
pub struct FakeRegistry {
    addr: SocketAddr,
    stored: Arc<Mutex<Stored>>,
    open: watch::Receiver<usize>,
    server: tokio::task::JoinHandle<()>,
}

impl fmt::Debug for FakeRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FakeRegistry").field("addr", &self.addr).finish_non_exhaustive()
    }
}

impl Drop for FakeRegistry {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl FakeRegistry {
    /// Starts one on a free loopback port.
    ///
    /// # Errors
    /// When no port is free.
    pub async fn start() -> io::Result<Self> {
        Self::listen(None).await
    }

    /// As [`FakeRegistry::start`], over TLS with this certificate chain and key in PEM.
    ///
    /// # Errors
    /// When no port is free or the certificate is no good.
    pub async fn start_tls(certificates: &[u8], key: &[u8]) -> io::Result<Self> {
        use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
        let chain: Vec<_> = CertificateDer::pem_slice_iter(certificates)
            .collect::<Result<_, _>>()
            .map_err(io::Error::other)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(io::Error::other)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(io::Error::other)?;
        Self::listen(Some(TlsAcceptor::from(Arc::new(config)))).await
    }

    async fn listen(tls: Option<TlsAcceptor>) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let stored = Arc::new(Mutex::new(Stored::default()));
        let (count, open) = watch::channel(0);
        let server = tokio::spawn(accept(listener, addr, Arc::clone(&stored), count, tls));
        Ok(Self { addr, stored, open, server })
    }

    /// `127.0.0.1:PORT`.
    #[must_use]
    pub fn host(&self) -> String {
        self.addr.to_string()
    }

    /// The port.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.addr.port()
    }

    fn stored(&self) -> MutexGuard<'_, Stored> {
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores a blob under its digest, which it answers.
    pub fn put_blob(&self, bytes: &[u8]) -> String {
        let digest = digest_of(bytes);
        self.put_blob_as(&digest, bytes);
        digest
    }

    /// Stores a blob under any digest.
    pub fn put_blob_as(&self, digest: &str, bytes: &[u8]) {
        self.stored().blobs.insert(digest.to_owned(), Arc::new(bytes.to_vec()));
    }

    /// Stores a manifest under a tag and its digest, which it answers.
    pub fn put_manifest(&self, repository: &str, tag: &str, manifest: &Manifest) -> String {
        let digest = manifest.digest();
        self.put_manifest_as(repository, tag, manifest);
        self.put_manifest_as(repository, &digest, manifest);
        digest
    }

    /// Stores a manifest under any tag or digest.
    pub fn put_manifest_as(&self, repository: &str, name: &str, manifest: &Manifest) {
        let key = (repository.to_owned(), name.to_owned());
        self.stored().manifests.insert(key, manifest.clone());
    }

    /// Stores an artifact with all its blobs; answers the manifest's digest.
    pub fn put(&self, repository: &str, tag: &str, artifact: &Artifact) -> String {
        for blob in artifact.blobs() {
            self.put_blob(&blob.bytes);
        }
        self.put_manifest(repository, tag, &artifact.manifest())
    }

    /// Stores all of a layout: every blob also as a manifest under its name, and each tag of the index.
    pub fn put_layout(&self, repository: &str, layout: &Layout) {
        let media_type = "application/vnd.oci.image.manifest.v1+json".to_owned();
        for (digest, bytes) in &layout.blobs {
            self.put_blob_as(digest, bytes);
            let manifest = Manifest { bytes: bytes.clone(), media_type: media_type.clone() };
            self.put_manifest_as(repository, digest, &manifest);
            for (tag, _) in layout.tags.iter().filter(|(_, wanted)| wanted == digest) {
                self.put_manifest_as(repository, tag, &manifest);
            }
        }
    }

    /// Stores a file under an absolute path outside the registry's API.
    pub fn put_file(&self, path: &str, bytes: &[u8]) {
        self.stored().files.insert(path.to_owned(), Arc::new(bytes.to_vec()));
    }

    /// Answers the next `times` requests whose path holds `needle` with `reply`. Earlier rules go first.
    pub fn script(&self, needle: &str, times: usize, reply: Reply) {
        self.stored().rules.push(Rule { needle: needle.to_owned(), left: times, reply });
    }

    /// Limits each body to so many bytes a second; `None` lifts the limit.
    pub fn throttle(&self, bytes_per_second: Option<u64>) {
        self.stored().bytes_per_second = bytes_per_second;
    }

    /// Asks for this `user:password` (as base64) by HTTP Basic on every API request.
    pub fn require_basic(&self, base64: &str) {
        self.stored().basic = Some(format!("Basic {base64}"));
    }

    /// All requests so far.
    #[must_use]
    pub fn seen(&self) -> Vec<Seen> {
        self.stored().seen.clone()
    }

    /// How many GET requests had `needle` in their path.
    #[must_use]
    pub fn count(&self, needle: &str) -> usize {
        let stored = self.stored();
        stored.seen.iter().filter(|seen| seen.method == "GET" && seen.path.contains(needle)).count()
    }

    /// How many body bytes were sent so far.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.stored().sent
    }

    /// Waits until no connection is open, at most `limit`; answers whether that came.
    pub async fn idle_within(&self, limit: Duration) -> bool {
        let mut open = self.open.clone();
        tokio::time::timeout(limit, open.wait_for(|count| *count == 0)).await.is_ok()
    }
}

async fn accept(
    listener: TcpListener,
    addr: SocketAddr,
    stored: Arc<Mutex<Stored>>,
    count: watch::Sender<usize>,
    tls: Option<TlsAcceptor>,
) {
    // Dropped, and so ended, with this task.
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        let connection = Connection { addr, stored: Arc::clone(&stored), count: count.clone() };
        count.send_modify(|open| *open += 1);
        let tls = tls.clone();
        connections.spawn(async move {
            // A client that hangs up is no fault of the registry.
            let ended = match tls {
                None => connection.serve(stream).await,
                Some(tls) => match tls.accept(stream).await {
                    Ok(stream) => connection.serve(stream).await,
                    Err(error) => Err(error),
                },
            };
            drop(ended);
            connection.count.send_modify(|open| *open -= 1);
        });
    }
}

struct Connection {
    addr: SocketAddr,
    stored: Arc<Mutex<Stored>>,
    count: watch::Sender<usize>,
}

/// An answer in full.
struct Answer {
    status: &'static str,
    headers: String,
    body: Arc<Vec<u8>>,
    from: usize,
}

impl Answer {
    fn plain(status: &'static str, text: &str) -> Self {
        let body = Arc::new(text.as_bytes().to_vec());
        Self { status, headers: String::new(), body, from: 0 }
    }
}

impl Connection {
    async fn serve(&self, stream: impl AsyncRead + AsyncWrite + Unpin) -> io::Result<()> {
        let mut stream = BufReader::new(stream);
        while let Some(head) = read_head(&mut stream).await? {
            read_body(&mut stream, &head).await?;
            let reply = self.note(&head);
            if !self.answer(&mut stream, &head, reply).await? {
                stream.shutdown().await?;
                return Ok(());
            }
        }
        Ok(())
    }

    fn stored(&self) -> MutexGuard<'_, Stored> {
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the request; answers what the script says about it.
    fn note(&self, head: &Head) -> Option<Reply> {
        let mut stored = self.stored();
        let path = head.word(1).to_owned();
        stored.seen.push(Seen {
            method: head.word(0).to_owned(),
            path: path.clone(),
            headers: head.headers.clone(),
            at: Instant::now(),
        });
        let rule =
            stored.rules.iter_mut().find(|rule| rule.left > 0 && path.contains(&rule.needle));
        let rule = rule?;
        rule.left = rule.left.saturating_sub(1);
        Some(rule.reply.clone())
    }

    /// Sends an answer; `false` when the connection ends with it.
    async fn answer(
        &self,
        to: &mut (impl AsyncWrite + Unpin),
        head: &Head,
        reply: Option<Reply>,
    ) -> io::Result<bool> {
        let mut answer = self.find(head, !matches!(reply, Some(Reply::IgnoreRange)));
        let mut end = usize::MAX;
        match reply {
            Some(Reply::Raw(text)) => {
                let port = self.addr.port().to_string();
                let text = text.replace("@PORT@", &port).replace("@SELF@", head.word(1));
                to.write_all(text.replace("\r\n", "\n").replace('\n', "\r\n").as_bytes()).await?;
                to.flush().await?;
                return Ok(false);
            }
            Some(Reply::Silence) => std::future::pending().await,
            Some(Reply::Cut(bytes)) => end = bytes,
            Some(Reply::WithHeader(name, value)) => {
                answer.headers.push_str(&format!("{name}: {value}\r\n"));
            }
            Some(Reply::IgnoreRange) | None => {}
        }
        let body = answer.body.get(answer.from..).unwrap_or_default();
        let start = format!(
            "HTTP/1.1 {}\r\nContent-Length: {}\r\n{}\r\n",
            answer.status,
            body.len(),
            answer.headers
        );
        to.write_all(start.as_bytes()).await?;
        if head.word(0) == "HEAD" {
            to.flush().await?;
            return Ok(true);
        }
        let cut = end < body.len();
        self.send(to, body.get(..end).unwrap_or(body)).await?;
        Ok(!cut)
    }

    async fn send(&self, to: &mut (impl AsyncWrite + Unpin), body: &[u8]) -> io::Result<()> {
        let begun = Instant::now();
        let mut sent = 0_u64;
        for piece in body.chunks(PIECE) {
            to.write_all(piece).await?;
            to.flush().await?;
            let bytes = u64::try_from(piece.len()).unwrap_or(u64::MAX);
            sent += bytes;
            let limit = {
                let mut stored = self.stored();
                stored.sent += bytes;
                stored.bytes_per_second
            };
            if let Some(limit) = limit {
                let due = Duration::from_millis(sent.saturating_mul(1000) / limit.max(1));
                tokio::time::sleep_until(begun + due).await;
            }
        }
        Ok(())
    }

    fn find(&self, head: &Head, ranges: bool) -> Answer {
        let stored = self.stored();
        let path = head.word(1).split('?').next().unwrap_or_default();
        if let Some(file) = stored.files.get(path) {
            return ranged(head, file, ranges);
        }
        let Some(rest) = path.strip_prefix("/v2/") else {
            return Answer::plain("404 Not Found", "no such file");
        };
        if stored.basic.is_some() && stored.basic.as_deref() != head.header("authorization") {
            let mut answer = Answer::plain("401 Unauthorized", "{}");
            answer.headers.push_str("WWW-Authenticate: Basic realm=\"fake\"\r\n");
            return answer;
        }
        if let Some((_, digest)) = rest.split_once("/blobs/") {
            return stored.blobs.get(digest).map_or_else(
                || Answer::plain("404 Not Found", "{\"errors\":[{\"code\":\"BLOB_UNKNOWN\"}]}"),
                |blob| ranged(head, blob, ranges),
            );
        }
        let name = rest.split_once("/manifests/");
        let key = name.map(|(repository, name)| (repository.to_owned(), name.to_owned()));
        match key.and_then(|key| stored.manifests.get(&key)) {
            Some(manifest) => Answer {
                status: "200 OK",
                headers: format!("Content-Type: {}\r\n", manifest.media_type),
                body: Arc::new(manifest.bytes.clone()),
                from: 0,
            },
            None => {
                Answer::plain("404 Not Found", "{\"errors\":[{\"code\":\"MANIFEST_UNKNOWN\"}]}")
            }
        }
    }
}

fn ranged(head: &Head, body: &Arc<Vec<u8>>, ranges: bool) -> Answer {
    let from = head
        .header("range")
        .filter(|_| ranges)
        .and_then(|text| text.strip_prefix("bytes="))
        .and_then(|text| text.strip_suffix('-'))
        .and_then(|text| text.parse::<usize>().ok());
    let body = Arc::clone(body);
    match from {
        None => Answer { status: "200 OK", headers: String::new(), body, from: 0 },
        Some(from) if from < body.len() => Answer {
            status: "206 Partial Content",
            headers: format!(
                "Content-Range: bytes {from}-{}/{}\r\n",
                body.len().saturating_sub(1),
                body.len()
            ),
            body,
            from,
        },
        Some(_) => Answer::plain("416 Range Not Satisfiable", ""),
    }
}
