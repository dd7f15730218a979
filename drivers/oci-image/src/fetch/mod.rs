//! Requests to registries and file servers.
//!
//! [`Fetcher::get`] sends one GET: it passes the host's [`gate`], follows redirects by itself (each hop is checked, and
//! credentials go to the registry's own origin only), answers a challenge once ([`auth`]), and hands back a response with a
//! good status. [`blob`] reads a body into a partial file.

pub(crate) mod auth;
pub(crate) mod blob;
pub(crate) mod gate;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::StreamExt;
use reqwest::{
    Client, Response, StatusCode, Url,
    header::{ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, HeaderValue, LOCATION, RANGE, RETRY_AFTER},
};
use tokio::sync::OnceCell;

use self::{auth::Session, gate::Gate};
use crate::{
    config::OciImageConfig,
    error::{ImageError, Result, shown},
};

/// How long a connection, TLS included, may take to come up.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// How long a server may take until its answer begins.
const HEAD_LIMIT: Duration = Duration::from_secs(30);
/// How long a body may be silent.
pub(crate) const STALL_LIMIT: Duration = Duration::from_secs(30);
/// The most redirects of one request.
const MAX_REDIRECTS: usize = 10;
/// How often a request is sent that fails by the connection or with a 5xx status.
const TRIES: u32 = 3;
/// How often a request is sent that is answered with "too many requests".
const GATE_ROUNDS: u32 = 8;

/// One GET request.
#[derive(Clone, Debug)]
pub(crate) struct Ask<'a> {
    pub(crate) url: Url,
    /// What people call it: `"manifest of registry/repository:tag"`.
    pub(crate) what: &'a str,
    pub(crate) accept: Option<&'static str>,
    /// The first byte that is wanted.
    pub(crate) from: u64,
}

/// The client of all registries and file servers.
#[derive(Debug)]
pub(crate) struct Fetcher {
    config: Arc<OciImageConfig>,
    client: OnceCell<Client>,
    gates: Mutex<HashMap<String, Arc<Gate>>>,
    tokens: auth::Tokens,
}

impl Fetcher {
    pub(crate) fn new(config: Arc<OciImageConfig>) -> Self {
        Self {
            config,
            client: OnceCell::new(),
            gates: Mutex::new(HashMap::new()),
            tokens: auth::Tokens::default(),
        }
    }

    /// The base URL of a registry.
    pub(crate) fn registry_url(&self, registry: &str) -> Result<Url> {
        // Docker Hub's API is not at the name under which people know it.
        let host = if registry == "docker.io" { "registry-1.docker.io" } else { registry };
        let plain = is_loopback(host_of(host)) || self.is_insecure(host);
        let scheme = if plain { "http" } else { "https" };
        Url::parse(&format!("{scheme}://{host}/v2/"))
            .map_err(|error| ImageError::malformed("registry", error.to_string()))
    }

    fn is_insecure(&self, authority: &str) -> bool {
        let host = host_of(authority);
        self.config.insecure.iter().any(|name| name == authority || name == host)
    }

    /// Refuses a URL of another scheme, and plain HTTP to a host for which it is not configured.
    pub(crate) fn check_url(&self, url: &Url) -> Result<()> {
        let host = url.host_str().unwrap_or_default();
        match url.scheme() {
            "https" => Ok(()),
            "http" if is_loopback(host) || self.is_insecure(&authority(url)) => Ok(()),
            "http" => Err(ImageError::denied(
                authority(url),
                "plain HTTP is refused; list the host in `insecure` if that is wanted",
            )),
            other => Err(ImageError::denied(
                authority(url),
                format!("the scheme {} is not supported", shown(other)),
            )),
        }
    }

    /// Sends a request to its good end.
    pub(crate) async fn get(&self, ask: &Ask<'_>, session: Option<&Session>) -> Result<Response> {
        let mut header = match session {
            Some(session) => self.tokens.known(session),
            None => None,
        };
        let mut asked = false;
        loop {
            let (answer, at_origin) = self.follow(ask, session, header.as_ref()).await?;
            let status = answer.status();
            if status.is_success() {
                return Ok(answer);
            }
            match session {
                // Once: a second refusal of fresh credentials is final.
                Some(session) if status == StatusCode::UNAUTHORIZED && at_origin && !asked => {
                    asked = true;
                    header = Some(self.authorize(session, &answer).await?);
                }
                Some(_) | None => return Err(refused(ask.what, answer).await),
            }
        }
    }

    /// Sends a request and follows redirects; answers the last response and whether it is the origin's.
    async fn follow(
        &self,
        ask: &Ask<'_>,
        session: Option<&Session>,
        header: Option<&HeaderValue>,
    ) -> Result<(Response, bool)> {
        let mut url = ask.url.clone();
        for _ in 0..=MAX_REDIRECTS {
            self.check_url(&url)?;
            let at_origin = session.is_some_and(|session| session.is_origin(&url));
            let answer = self.hop(&url, ask, header.filter(|_| at_origin)).await?;
            if !answer.status().is_redirection() || answer.status() == StatusCode::NOT_MODIFIED {
                return Ok((answer, at_origin));
            }
            let next = answer
                .headers()
                .get(LOCATION)
                .and_then(|value| value.to_str().ok())
                .and_then(|text| url.join(text).ok())
                .ok_or_else(|| ImageError::unavailable(ask.what, "a redirect without a target"))?;
            if url.scheme() == "https" && next.scheme() != "https" {
                let reason = format!(
                    "a redirect from https to {} at {} is refused",
                    shown(next.scheme()),
                    shown(&authority(&next))
                );
                return Err(ImageError::denied(ask.what, reason));
            }
            url = next;
        }
        let reason = format!("more than {MAX_REDIRECTS} redirects");
        Err(ImageError::denied(ask.what, reason))
    }

    /// Sends to one host: waits at its gate, and tries again what may succeed the next time.
    async fn hop(
        &self,
        url: &Url,
        ask: &Ask<'_>,
        header: Option<&HeaderValue>,
    ) -> Result<Response> {
        let gate = self.gate(&authority(url));
        let (mut tries, mut rounds) = (0, 0);
        loop {
            let pass = gate.enter().await;
            let sent = self.send(url, ask, header).await;
            let status = sent.as_ref().ok().map(Response::status);
            let busy = [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];
            if let (Ok(answer), Some(true)) = (&sent, status.map(|status| busy.contains(&status))) {
                let said = answer.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
                let wait = gate.refuse(said, std::time::SystemTime::now());
                drop(pass);
                rounds += 1;
                if rounds < GATE_ROUNDS {
                    continue;
                }
                return Err(ImageError::Unavailable {
                    what: ask.what.to_owned(),
                    reason: format!("{} answers that it is too busy", authority(url)),
                    retry_after: Some(wait),
                });
            }
            gate.open();
            drop(pass);
            tries += 1;
            let again = match &sent {
                Ok(answer) => answer.status().is_server_error(),
                Err(_) => true,
            };
            if !again || tries >= TRIES {
                return sent;
            }
            tokio::time::sleep(gate::jittered(Duration::from_millis(100) * 4_u32.pow(tries))).await;
        }
    }

    async fn send(
        &self,
        url: &Url,
        ask: &Ask<'_>,
        header: Option<&HeaderValue>,
    ) -> Result<Response> {
        let client = self.client.get_or_try_init(|| make_client(&self.config)).await?;
        let mut request = client.get(url.clone()).header(ACCEPT_ENCODING, "identity");
        if let Some(accept) = ask.accept {
            request = request.header(ACCEPT, accept);
        }
        if ask.from > 0 {
            request = request.header(RANGE, format!("bytes={}-", ask.from));
        }
        if let Some(header) = header {
            request = request.header(AUTHORIZATION, header.clone());
        }
        match tokio::time::timeout(HEAD_LIMIT, request.send()).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(ImageError::unavailable(
                ask.what,
                format!("{} does not answer: {}", authority(url), chain(error)),
            )),
            Err(_) => Err(ImageError::unavailable(
                ask.what,
                format!("{} was silent for {} s", authority(url), HEAD_LIMIT.as_secs()),
            )),
        }
    }

    fn gate(&self, authority: &str) -> Arc<Gate> {
        let mut gates = self.gates.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(gates.entry(authority.to_owned()).or_default())
    }
}

/// `HOST:PORT`, the port also where it is the scheme's own.
pub(crate) fn authority(url: &Url) -> String {
    let port = url.port_or_known_default().unwrap_or_default();
    format!("{}:{port}", url.host_str().unwrap_or_default())
}

fn host_of(authority: &str) -> &str {
    authority.rsplit_once(':').map_or(authority, |(host, _)| host)
}

/// Whether a host is this host, whatever the network says: an address of the loopback block, or `localhost`.
fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost"
        || bare.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// The text of an error and its causes, without the URL: its query may hold a signature.
fn chain(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut text = error.to_string();
    let mut next = std::error::Error::source(&error);
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    shown(&text)
}

/// The error for a response that is no success.
async fn refused(what: &str, answer: Response) -> ImageError {
    let status = answer.status();
    let said = read_all(answer, 4 << 10, what).await.unwrap_or_default();
    let said = shown(String::from_utf8_lossy(&said).trim());
    let said = if said.is_empty() { String::new() } else { format!(": {said}") };
    let reason = format!("the server answers {}{said}", status.as_u16());
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => ImageError::denied(what, reason),
        StatusCode::NOT_FOUND | StatusCode::GONE => ImageError::not_found(what, reason),
        _ => ImageError::unavailable(what, reason),
    }
}

/// Reads a small body.
pub(crate) async fn read_all(answer: Response, limit: u64, what: &str) -> Result<Vec<u8>> {
    let too_large = || ImageError::TooLarge { what: what.to_owned(), limit };
    if answer.content_length().is_some_and(|length| length > limit) {
        return Err(too_large());
    }
    let most = usize::try_from(limit).unwrap_or(usize::MAX);
    let mut body = Vec::new();
    let mut stream = answer.bytes_stream();
    loop {
        match tokio::time::timeout(STALL_LIMIT, stream.next()).await {
            Ok(Some(Ok(piece))) => body.extend_from_slice(&piece),
            Ok(Some(Err(error))) => return Err(ImageError::unavailable(what, chain(error))),
            Ok(None) => return Ok(body),
            Err(_) => return Err(ImageError::unavailable(what, "the server stopped sending")),
        }
        if body.len() > most {
            return Err(too_large());
        }
    }
}

/// Makes the HTTP client with a cryptographic provider of its own, so that nothing process-wide is set.
async fn make_client(config: &OciImageConfig) -> Result<Client> {
    let extra = config.extra_roots.clone();
    let roots =
        host::bound::blocking("read certificates", move || Ok(read_roots(&extra))).await??;
    let internal = |error: rustls::Error| ImageError::Internal(error.to_string());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(internal)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Client::builder()
        .tls_backend_preconfigured(tls)
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .connect_timeout(CONNECT_LIMIT)
        .pool_idle_timeout(Duration::from_secs(20))
        .user_agent(concat!("bcd-node/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|error| ImageError::Internal(chain(error)))
}

fn read_roots(extra: &[std::path::PathBuf]) -> Result<rustls::RootCertStore> {
    use rustls::pki_types::{CertificateDer, pem::PemObject};
    let mut roots = rustls::RootCertStore::empty();
    let native = rustls_native_certs::load_native_certs();
    for error in &native.errors {
        tracing::warn!(%error, "a certificate of the host cannot be read");
    }
    roots.add_parsable_certificates(native.certs);
    for path in extra {
        let unusable = |reason: String| {
            ImageError::unavailable(format!("certificates in {}", path.display()), reason)
        };
        for certificate in
            CertificateDer::pem_file_iter(path).map_err(|error| unusable(error.to_string()))?
        {
            let certificate = certificate.map_err(|error| unusable(error.to_string()))?;
            roots.add(certificate).map_err(|error| unusable(error.to_string()))?;
        }
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_an_address_not_a_name_that_begins_like_one() {
        for (host, wanted) in [
            ("127.0.0.1", true),
            ("127.9.9.9", true),
            ("[::1]", true),
            ("localhost", true),
            ("127.0.0.1.example.org", false),
            ("localhost.example.org", false),
            ("10.0.0.1", false),
        ] {
            assert_eq!(is_loopback(host), wanted, "{host}");
        }
    }
}
