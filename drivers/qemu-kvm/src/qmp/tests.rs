//! The client against a monitor that does not play by the rules.

use std::time::Duration;

use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
};

use super::{Client, QmpError, RunState};

const LIMIT: Duration = Duration::from_millis(300);
const GREETING: &[u8] = b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n";

/// Connects to a peer that greets and takes the capabilities, then does what `peer` does.
async fn against<F, P>(peer: P) -> Client
where
    P: FnOnce(BufReader<UnixStream>) -> F + Send + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp.sock");
    let listener = UnixListener::bind(&path).unwrap();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = BufReader::new(stream);
        stream.write_all(GREETING).await.unwrap();
        let line = line(&mut stream).await;
        assert!(line.contains("qmp_capabilities"), "{line}");
        stream.write_all(b"{\"return\": {}, \"id\": 1}\n").await.unwrap();
        peer(stream).await;
    });
    Client::connect(&path, Client::event_channel()).await.unwrap()
}

async fn line(stream: &mut BufReader<UnixStream>) -> String {
    let mut line = String::new();
    stream.read_line(&mut line).await.unwrap();
    line
}

#[tokio::test]
async fn replies_are_matched_by_number_and_events_pass_between_them() {
    let client = against(|mut stream| async move {
        let (first, second) = (line(&mut stream).await, line(&mut stream).await);
        assert!(first.contains("\"id\":2") && second.contains("\"id\":3"), "{first}{second}");
        let answers = b"{\"return\": {\"status\": \"paused\"}, \"id\": 3}\n\
            {\"event\": \"RESUME\", \"timestamp\": {}}\n\
            {\"return\": {}, \"id\": 99}\n\
            {\"return\": {\"status\": \"running\"}, \"id\": 2}\n";
        for part in answers.chunks(7) {
            stream.write_all(part).await.unwrap();
            stream.flush().await.unwrap();
        }
        std::future::pending::<()>().await;
    })
    .await;
    let mut events = client.events();
    let (first, second) = tokio::join!(client.query_status(LIMIT), client.query_status(LIMIT));
    assert_eq!((first.unwrap(), second.unwrap()), (RunState::Running, RunState::Paused));
    assert_eq!(events.recv().await.unwrap().name, "RESUME");
}

#[tokio::test]
async fn a_monitor_that_is_silent_ends_a_call_at_its_limit_and_only_that() {
    let client = against(|mut stream| async move {
        line(&mut stream).await;
        line(&mut stream).await;
        stream.write_all(b"{\"return\": {}, \"id\": 3}\n").await.unwrap();
        std::future::pending::<()>().await;
    })
    .await;
    let error = client.query_status(LIMIT).await.unwrap_err();
    assert!(matches!(error, QmpError::Silent { .. }), "{error}");
    client.cont(LIMIT).await.unwrap();
}

#[tokio::test]
async fn garbage_and_an_endless_message_close_the_connection() {
    let garbage: [&[u8]; 4] =
        [b"nonsense\n", b"{\"return\"\n", b"[1, 2]\n", b"{\"id\": \"x\", \"return\": 1}\n"];
    for bytes in garbage {
        let client = against(move |mut stream| async move {
            line(&mut stream).await;
            stream.write_all(bytes).await.unwrap();
            std::future::pending::<()>().await;
        })
        .await;
        let error = client.query_status(Duration::from_secs(5)).await.unwrap_err();
        assert!(matches!(error, QmpError::Closed), "{error}");
    }
    let client = against(|mut stream| async move {
        line(&mut stream).await;
        let chunk = vec![b'x'; 1 << 16];
        while stream.write_all(&chunk).await.is_ok() {}
    })
    .await;
    let error = client.query_status(Duration::from_secs(20)).await.unwrap_err();
    assert!(matches!(error, QmpError::Closed), "{error}");
    assert!(matches!(client.cont(LIMIT).await, Err(QmpError::Closed)));
}

#[tokio::test]
async fn a_refusal_carries_class_and_text() {
    let client = against(|mut stream| async move {
        line(&mut stream).await;
        let refusal =
            b"{\"id\": 2, \"error\": {\"class\": \"DeviceNotFound\", \"desc\": \"no\\u001b[31m\"}}\n";
        stream.write_all(refusal).await.unwrap();
        std::future::pending::<()>().await;
    })
    .await;
    let error = client.device_del("disk", LIMIT).await.unwrap_err();
    assert!(error.is_absent() && !error.is_open());
    assert_eq!(error.to_string(), "QEMU refused device_del: no\\u{1b}[31m");
}
