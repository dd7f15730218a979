//! As much HTTP/1.1 as the scripted registry and the uploader need.

use std::{collections::BTreeMap, io};

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt};

/// The head of a request or response: the first line's words and the headers by lower-case name.
#[derive(Clone, Debug, Default)]
pub(super) struct Head {
    pub(super) words: Vec<String>,
    pub(super) headers: BTreeMap<String, String>,
}

impl Head {
    /// The word of that place in the first line.
    pub(super) fn word(&self, at: usize) -> &str {
        self.words.get(at).map_or("", String::as_str)
    }

    /// A header's value.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// The length that the head announces for the body.
    pub(super) fn length(&self) -> u64 {
        self.header("content-length").and_then(|text| text.parse().ok()).unwrap_or(0)
    }
}

/// Reads a head; `None` when the other side closed before it.
pub(super) async fn read_head(from: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<Head>> {
    let mut head = Head::default();
    let mut line = String::new();
    if from.read_line(&mut line).await? == 0 {
        return Ok(None);
    }
    head.words = line.split_whitespace().map(str::to_owned).collect();
    loop {
        line.clear();
        if from.read_line(&mut line).await? == 0 || line.trim().is_empty() {
            return Ok(Some(head));
        }
        if let Some((name, value)) = line.split_once(':') {
            head.headers.insert(name.trim().to_ascii_lowercase(), value.trim().to_owned());
        }
    }
}

/// Reads a body of the announced length.
pub(super) async fn read_body(
    from: &mut (impl AsyncBufRead + Unpin),
    head: &Head,
) -> io::Result<Vec<u8>> {
    let mut body = Vec::new();
    from.take(head.length()).read_to_end(&mut body).await?;
    Ok(body)
}
