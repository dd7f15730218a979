//! The part of D-Bus's wire format that one call and its answers need (D-Bus specification 0.43, "Message Protocol"): pure.

/// The most bytes of a message that is read. The manager's own are below 1 KiB.
pub(super) const MAX_MESSAGE: usize = 1 << 20;
/// The bytes before the array of header fields, and its length.
pub(super) const FIXED_HEADER: usize = 16;

/// Kinds of messages.
const METHOD_CALL: u8 = 1;
const METHOD_RETURN: u8 = 2;
const ERROR: u8 = 3;
const SIGNAL: u8 = 4;

/// Values in little-endian marshalling, each aligned to its size from the start.
#[derive(Debug, Default)]
pub(super) struct Writer(Vec<u8>);

impl Writer {
    pub(super) fn align(&mut self, to: usize) {
        self.0.resize(self.0.len().next_multiple_of(to), 0);
    }
    pub(super) fn byte(&mut self, value: u8) {
        self.0.push(value);
    }
    pub(super) fn number(&mut self, value: u32) {
        self.align(4);
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    pub(super) fn text(&mut self, value: &str) {
        self.number(u32::try_from(value.len()).unwrap_or(u32::MAX));
        self.0.extend_from_slice(value.as_bytes());
        self.byte(0);
    }
    pub(super) fn signature(&mut self, value: &str) {
        self.byte(u8::try_from(value.len()).unwrap_or(u8::MAX));
        self.0.extend_from_slice(value.as_bytes());
        self.byte(0);
    }
    /// An array of elements that are aligned to `align`: its length is that of the elements alone.
    pub(super) fn array(&mut self, align: usize, elements: impl FnOnce(&mut Self)) {
        self.number(0);
        let length_at = self.0.len() - 4;
        self.align(align);
        let begin = self.0.len();
        elements(self);
        let length = u32::try_from(self.0.len() - begin).unwrap_or(u32::MAX);
        if let Some(place) = self.0.get_mut(length_at..length_at + 4) {
            place.copy_from_slice(&length.to_le_bytes());
        }
    }
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// A method call.
#[derive(Debug)]
pub(super) struct Call<'a> {
    pub(super) destination: &'a str,
    pub(super) path: &'a str,
    pub(super) interface: &'a str,
    pub(super) member: &'a str,
    /// The signature and the marshalled arguments.
    pub(super) body: (&'a str, Vec<u8>),
}

impl Call<'_> {
    /// The message.
    pub(super) fn marshal(self, serial: u32) -> Vec<u8> {
        let (signature, body) = self.body;
        let mut out = Writer::default();
        for byte in [b'l', METHOD_CALL, 0, 1] {
            out.byte(byte);
        }
        out.number(u32::try_from(body.len()).unwrap_or(u32::MAX));
        out.number(serial);
        out.array(8, |out| {
            let fields = [
                (1, "o", self.path),
                (2, "s", self.interface),
                (3, "s", self.member),
                (6, "s", self.destination),
            ];
            for (code, kind, value) in fields {
                out.align(8);
                out.byte(code);
                out.signature(kind);
                out.text(value);
            }
            if !signature.is_empty() {
                out.align(8);
                out.byte(8);
                out.signature("g");
                out.signature(signature);
            }
        });
        out.align(8);
        let mut message = out.into_bytes();
        message.extend_from_slice(&body);
        message
    }
}

/// What came.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// The answer to the call of this number, with its first argument where that is a text.
    Return(u32, String),
    /// The error that answers the call of this number: its name and its text.
    Error(u32, String, String),
    /// A signal's name and its arguments that are texts, in order.
    Signal(String, Vec<String>),
    /// Anything else.
    Other,
}

/// Reads marshalled values; `None` where there is not what is asked for.
#[derive(Debug)]
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn align(&mut self, to: usize) {
        self.at = self.at.next_multiple_of(to);
    }
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let taken = self.bytes.get(self.at..self.at.checked_add(count)?)?;
        self.at += count;
        Some(taken)
    }
    fn byte(&mut self) -> Option<u8> {
        self.take(1)?.first().copied()
    }
    fn number(&mut self) -> Option<u32> {
        self.align(4);
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }
    fn text(&mut self) -> Option<String> {
        let length = usize::try_from(self.number()?).ok()?;
        let text = std::str::from_utf8(self.take(length)?).ok()?.to_owned();
        self.take(1)?;
        Some(text)
    }
    fn signature(&mut self) -> Option<String> {
        let length = usize::from(self.byte()?);
        let text = std::str::from_utf8(self.take(length)?).ok()?.to_owned();
        self.take(1)?;
        Some(text)
    }
    /// The texts among values of a signature, up to one of a kind that does not occur here.
    fn texts(&mut self, signature: &str) -> Vec<String> {
        let mut texts = Vec::new();
        for kind in signature.chars() {
            let read = match kind {
                's' | 'o' => self.text().map(|text| texts.push(text)),
                'u' => self.number().map(drop),
                _ => None,
            };
            if read.is_none() {
                break;
            }
        }
        texts
    }
}

/// The whole length of the message that begins with these bytes; `None` when it is none that we read.
pub(super) fn length(fixed: &[u8; FIXED_HEADER]) -> Option<usize> {
    let mut reader = Reader { bytes: fixed, at: 0 };
    if reader.byte()? != b'l' {
        return None;
    }
    reader.take(3)?;
    let body = usize::try_from(reader.number()?).ok()?;
    reader.number()?;
    let fields = usize::try_from(reader.number()?).ok()?;
    let header = FIXED_HEADER.checked_add(fields)?.checked_next_multiple_of(8)?;
    header.checked_add(body).filter(|length| *length <= MAX_MESSAGE)
}

/// Reads a whole message; `None` for one that breaks the format.
pub(super) fn parse(bytes: &[u8]) -> Option<Message> {
    let kind = *bytes.get(1)?;
    let mut reader = Reader { bytes, at: 12 };
    let fields = usize::try_from(reader.number()?).ok()?;
    let end = FIXED_HEADER.checked_add(fields)?;
    let (mut member, mut error, mut answers, mut signature) =
        (String::new(), String::new(), 0, String::new());
    while reader.at < end {
        reader.align(8);
        let code = reader.byte()?;
        match (code, reader.signature()?.as_str()) {
            (3, "s") => member = reader.text()?,
            (4, "s") => error = reader.text()?,
            (5, "u") => answers = reader.number()?,
            (8, "g") => signature = reader.signature()?,
            (_, "s" | "o") => drop(reader.text()?),
            (_, "u") => drop(reader.number()?),
            (_, "g") => drop(reader.signature()?),
            _ => return None,
        }
    }
    reader.at = end.checked_next_multiple_of(8)?;
    let texts = reader.texts(&signature);
    let first = texts.first().cloned().unwrap_or_default();
    Some(match kind {
        METHOD_RETURN => Message::Return(answers, first),
        ERROR => Message::Error(answers, error, first),
        SIGNAL => Message::Signal(member, texts),
        _ => Message::Other,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// `busctl call … Hello`, as `dbus-monitor --binary` shows it, but for the sender that the bus adds.
    #[test]
    fn a_call_without_arguments_has_the_bytes_of_the_specification() {
        let call = Call {
            destination: "a.b",
            path: "/a",
            interface: "a.b",
            member: "M",
            body: ("", Vec::new()),
        };
        let mut wanted = b"l\x01\0\x01\0\0\0\0\x07\0\0\0".to_vec();
        wanted.extend_from_slice(&[60, 0, 0, 0]);
        wanted.extend_from_slice(b"\x01\x01o\0\x02\0\0\0/a\0\0\0\0\0\0");
        wanted.extend_from_slice(b"\x02\x01s\0\x03\0\0\0a.b\0\0\0\0\0");
        wanted.extend_from_slice(b"\x03\x01s\0\x01\0\0\0M\0\0\0\0\0\0\0");
        wanted.extend_from_slice(b"\x06\x01s\0\x03\0\0\0a.b\0\0\0\0\0");
        let bytes = call.marshal(7);
        assert_eq!(bytes, wanted);
        assert_eq!(length(bytes.first_chunk().unwrap()), Some(bytes.len()));
    }

    #[test]
    fn a_signal_gives_its_name_and_its_texts() {
        let mut body = Writer::default();
        body.number(12);
        for text in ["/org/job/12", "a.scope", "done"] {
            body.text(text);
        }
        let call = Call {
            destination: ":1.2",
            path: "/",
            interface: "x.y",
            member: "JobRemoved",
            body: ("uoss", body.into_bytes()),
        };
        let mut bytes = call.marshal(1);
        bytes[1] = SIGNAL;
        let texts = ["/org/job/12", "a.scope", "done"].map(str::to_owned).to_vec();
        assert_eq!(parse(&bytes), Some(Message::Signal("JobRemoved".to_owned(), texts)));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_fail_otherwise_than_by_none(
            bytes in proptest::collection::vec(any::<u8>(), 0..200)
        ) {
            drop(parse(&bytes));
            if let Some(fixed) = bytes.first_chunk() {
                prop_assert!(length(fixed).is_none_or(|length| length <= MAX_MESSAGE));
            }
        }
    }
}
