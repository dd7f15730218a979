//! A store that is empty, corrupt, newer or in use: nothing on the host is destroyed.

use std::{path::PathBuf, time::Duration};

use crate::{
    manifests::hello,
    node::{Node, on_node},
};

fn store_files(node: &Node) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(node.path("state")).unwrap();
    let is_store = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().contains(".db");
    entries.map(|entry| entry.unwrap().path()).filter(is_store).collect()
}

/// The VM runs on, whatever the agent does.
async fn vm_lives(node: &Node, pid: u64) {
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(
        std::path::Path::new(&format!("/proc/{pid}/exe")).exists(),
        "the VM lives: {}",
        node.agent_log()
    );
}

#[test]
fn an_empty_store_destroys_nothing() {
    on_node(|mut node| async move {
        node.apply(&hello(&node.registry())).await;
        let pid = node.pid("hello").await;
        node.kill_agent().await;
        for file in store_files(&node) {
            std::fs::remove_file(file).unwrap();
        }
        node.start_agent().await;
        vm_lives(&node, pid).await;
        assert!(
            std::fs::read_dir(node.path("volumes")).unwrap().count() > 0,
            "the volume is there"
        );
        let address = "10.77.0.2".parse().unwrap();
        node.guest(address, |_| true).await;
    });
}

#[test]
fn a_corrupt_store_destroys_nothing_and_says_what_to_do() {
    on_node(|mut node| async move {
        node.apply(&hello(&node.registry())).await;
        let pid = node.pid("hello").await;
        node.kill_agent().await;
        for file in store_files(&node) {
            let length = std::fs::metadata(&file).unwrap().len();
            std::fs::write(&file, vec![0x5a; usize::try_from(length).unwrap()]).unwrap();
        }
        node.launch_agent();
        vm_lives(&node, pid).await;
        if !node.agent_ended() {
            assert_eq!(node.bcd(&["get"]).await.code, 0, "get answers");
        }
        let log = node.agent_log();
        assert!(
            log.contains("store") && log.contains("state"),
            "the message names the store: {log}"
        );
    });
}

#[test]
fn a_second_agent_on_one_state_directory_is_refused() {
    on_node(|mut node| async move {
        let first = node.bcd(&["get"]).await;
        assert_eq!(first.code, 0);
        let config = node.path("config.toml");
        let second = node.bcd(&["run", "--config", config.to_str().unwrap()]).await;
        assert_ne!(second.code, 0);
        assert!(
            second.err.contains("process") || second.err.contains("pid"),
            "names the holder: {second:?}"
        );
        assert_eq!(node.bcd(&["get"]).await.code, 0, "the first goes on");
        node.kill_agent().await;
        node.start_agent().await;
    });
}
