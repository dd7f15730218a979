//! Who we are to a registry.
//!
//! A password goes to the registry's own origin, or to the token service on the registry's host or on a host that the
//! configuration lists. A token goes to the registry's own origin only.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use drivers_api::{SecretRef, SecretResolver};
use http_auth::ChallengeRef;
use reqwest::{
    Response, StatusCode, Url,
    header::{HeaderMap, HeaderValue, WWW_AUTHENTICATE},
};
use serde::Deserialize;

use super::{Ask, Fetcher, authority, read_all, refused};
use crate::error::{ImageError, Result, shown};

/// The most bytes of a token service's answer.
const MAX_TOKEN_BYTES: u64 = 64 << 10;
/// How many tokens are kept.
const MAX_TOKENS: usize = 256;

/// One repository of one registry, and who asks.
pub(crate) struct Session {
    pub(crate) origin: Url,
    pub(crate) repository: String,
    pub(crate) user: Option<(String, SecretRef)>,
    pub(crate) secrets: Option<Arc<dyn SecretResolver>>,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("origin", &authority(&self.origin))
            .field("repository", &self.repository)
            .finish_non_exhaustive()
    }
}

impl Session {
    /// Whether credentials may go to this URL.
    pub(crate) fn is_origin(&self, url: &Url) -> bool {
        self.origin.scheme() == url.scheme() && authority(&self.origin) == authority(url)
    }

    /// The URL of an object of the repository. All parts were checked when the reference or manifest was parsed.
    pub(crate) fn url(&self, kind: &str, name: &str) -> Result<Url> {
        self.origin
            .join(&format!("{}/{kind}/{name}", self.repository))
            .map_err(|error| ImageError::malformed("reference", error.to_string()))
    }

    fn key(&self) -> (String, String) {
        (authority(&self.origin), self.repository.clone())
    }

    /// The value of an `Authorization` header with user and password.
    async fn basic(&self) -> Result<Option<HeaderValue>> {
        let Some((user, reference)) = &self.user else { return Ok(None) };
        let secrets = self.secrets.as_ref().ok_or_else(|| {
            ImageError::unavailable(reference.to_string(), "the caller has no secret resolver")
        })?;
        let password = secrets.resolve(reference).await?;
        let mut plain = format!("{user}:").into_bytes();
        plain.extend_from_slice(password.expose());
        let header = sensitive(format!("Basic {}", base64(&plain)));
        plain.fill(0);
        std::hint::black_box(&plain);
        header.map(Some)
    }
}

/// The headers that registries took last.
#[derive(Default)]
pub(crate) struct Tokens(Mutex<HashMap<(String, String), HeaderValue>>);

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").finish_non_exhaustive()
    }
}

impl Tokens {
    pub(crate) fn known(&self, session: &Session) -> Option<HeaderValue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&session.key()).cloned()
    }

    fn keep(&self, session: &Session, header: &HeaderValue) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= MAX_TOKENS {
            kept.clear();
        }
        kept.insert(session.key(), header.clone());
    }
}

/// What a registry asks for.
#[derive(Debug, PartialEq, Eq)]
enum Challenge {
    Basic,
    Bearer { realm: String, service: Option<String>, scope: Option<String> },
}

impl Fetcher {
    /// Answers a challenge; the header is kept for the next requests.
    pub(crate) async fn authorize(
        &self,
        session: &Session,
        answer: &Response,
    ) -> Result<HeaderValue> {
        let host = authority(&session.origin);
        let denied = |reason: &str| ImageError::denied(host.clone(), reason);
        let header = match challenge(answer.headers()) {
            Some(Challenge::Bearer { realm, service, scope }) => {
                self.token(session, &realm, service, scope).await?
            }
            Some(Challenge::Basic) => session.basic().await?.ok_or_else(|| {
                denied("the registry wants a user and password, and none are configured")
            })?,
            None => return Err(denied("the registry refuses without saying what it wants")),
        };
        self.tokens.keep(session, &header);
        Ok(header)
    }

    async fn token(
        &self,
        session: &Session,
        realm: &str,
        service: Option<String>,
        scope: Option<String>,
    ) -> Result<HeaderValue> {
        let mut url = Url::parse(realm).map_err(|_| {
            ImageError::denied(authority(&session.origin), "its token service has no valid URL")
        })?;
        self.check_realm(session, &url)?;
        let scope = scope.unwrap_or_else(|| format!("repository:{}:pull", session.repository));
        {
            let mut query = url.query_pairs_mut();
            query.append_pair("scope", &scope);
            if let Some(service) = &service {
                query.append_pair("service", service);
            }
        }
        let what = format!("token of {}", authority(&url));
        let service = Session {
            origin: url.clone(),
            repository: session.repository.clone(),
            user: None,
            secrets: None,
        };
        let basic = session.basic().await?;
        let ask = Ask { url, what: &what, accept: None, from: 0 };
        let (answer, _) = self.follow(&ask, Some(&service), basic.as_ref()).await?;
        if answer.status() != StatusCode::OK {
            return Err(refused(&what, answer).await);
        }
        let body = read_all(answer, MAX_TOKEN_BYTES, &what).await?;
        let token: Token = serde_json::from_slice(&body)
            .map_err(|_| ImageError::unavailable(what.clone(), "the answer holds no token"))?;
        let token = token
            .token
            .or(token.access_token)
            .ok_or_else(|| ImageError::unavailable(what, "the answer holds no token"))?;
        sensitive(format!("Bearer {token}"))
    }

    /// A registry may name any host as its token service, and the password would go there.
    fn check_realm(&self, session: &Session, realm: &Url) -> Result<()> {
        let there = authority(realm);
        let host = realm.host_str().unwrap_or_default();
        let listed = self.config.token_hosts.iter().any(|name| *name == there || name == host);
        if !session.is_origin(realm) && !listed {
            let reason = format!(
                "it names {} as its token service, which is not in `token_hosts`",
                shown(&there)
            );
            return Err(ImageError::denied(authority(&session.origin), reason));
        }
        if session.origin.scheme() == "https" && realm.scheme() != "https" {
            let reason = "it names a token service without TLS".to_owned();
            return Err(ImageError::denied(authority(&session.origin), reason));
        }
        self.check_url(realm)
    }
}

/// No `Debug`: it holds a secret.
#[derive(Deserialize)]
struct Token {
    #[serde(default)]
    token: Option<String>,
    #[serde(default)]
    access_token: Option<String>,
}

/// A header that is not printed; the text is cleared.
fn sensitive(text: String) -> Result<HeaderValue> {
    let header = HeaderValue::from_str(&text)
        .map_err(|_| ImageError::denied("credentials", "they cannot stand in a header"));
    let mut bytes = text.into_bytes();
    bytes.fill(0);
    std::hint::black_box(&bytes);
    let mut header = header?;
    header.set_sensitive(true);
    Ok(header)
}

/// The first challenge that we can answer, a token before a password.
fn challenge(headers: &HeaderMap) -> Option<Challenge> {
    let mut found = None;
    for value in headers.get_all(WWW_AUTHENTICATE) {
        let text = value.to_str().ok()?;
        for challenge in
            http_auth::parser::ChallengeParser::new(text).map_while(std::result::Result::ok)
        {
            if challenge.scheme.eq_ignore_ascii_case("bearer") {
                let realm = param(&challenge, "realm")?;
                return Some(Challenge::Bearer {
                    realm,
                    service: param(&challenge, "service"),
                    scope: param(&challenge, "scope"),
                });
            }
            if challenge.scheme.eq_ignore_ascii_case("basic") {
                found = Some(Challenge::Basic);
            }
        }
    }
    found
}

fn param(challenge: &ChallengeRef<'_>, name: &str) -> Option<String> {
    let (_, value) = challenge.params.iter().find(|(key, _)| key.eq_ignore_ascii_case(name))?;
    Some(value.to_unescaped())
}

/// Base64 with padding (RFC 4648 section 4).
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let bits = chunk.iter().fold(0_u32, |bits, byte| (bits << 8) | u32::from(*byte));
        let bits = bits << (8 * (3 - chunk.len()));
        for place in 0..4 {
            let sextet = usize::try_from((bits >> (18 - 6 * place)) & 63).unwrap_or_default();
            let letter = ALPHABET.get(sextet).copied().map_or('=', char::from);
            text.push(if place <= chunk.len() { letter } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_rfc() {
        for (plain, wanted) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(plain.as_bytes()), wanted);
        }
        assert_eq!(base64(&[0xff, 0xfe, 0xfd]), "//79");
    }

    #[test]
    fn a_token_challenge_goes_before_a_password_challenge() {
        let mut headers = HeaderMap::new();
        headers.append(WWW_AUTHENTICATE, HeaderValue::from_static("Basic realm=\"x\""));
        assert_eq!(challenge(&headers), Some(Challenge::Basic));
        let bearer = "Bearer realm=\"https://a/token\",service=\"s\"";
        headers.append(WWW_AUTHENTICATE, HeaderValue::from_static(bearer));
        let wanted = Challenge::Bearer {
            realm: "https://a/token".to_owned(),
            service: Some("s".to_owned()),
            scope: None,
        };
        assert_eq!(challenge(&headers), Some(wanted));
        assert_eq!(challenge(&HeaderMap::new()), None);
    }
}
