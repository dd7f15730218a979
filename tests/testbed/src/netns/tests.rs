use super::*;

fn links() -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir("/sys/class/net")
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_body_sees_only_its_own_links_in_every_thread_and_process() {
    in_netns(|| async {
        assert_eq!(links(), ["lo"]);
        assert_eq!(tokio::task::spawn_blocking(links).await.unwrap(), ["lo"]);
        let shown = tool(&["ip", "-br", "link"]);
        assert_eq!(shown.lines().count(), 1, "{shown}");
        assert!(std::fs::metadata("/proc/sys/net/ipv4/conf/lo").is_ok());
        tool(&["ping", "-c", "1", "-W", "1", "127.0.0.1"]);
    });
    assert!(Netns::current().unwrap().inode().unwrap() > 0);
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "a process that the namespace must outlast is wanted here"
)]
fn what_a_body_leaves_running_is_killed_even_when_it_panics() {
    let (send, receive) = std::sync::mpsc::channel();
    let body = move || async move {
        let child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        send.send(child.id()).unwrap();
        // Reaped by a wait on another thread, so that the pid is really gone.
        thread::spawn(move || {
            let mut child = child;
            child.wait()
        });
        panic!("on purpose");
    };
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| in_netns(body))).is_err());
    let pid = receive.recv().unwrap();
    for _ in 0..100 {
        if net_inode(pid.cast_signed()).is_none() {
            return;
        }
        thread::yield_now();
    }
    assert_eq!(net_inode(pid.cast_signed()), None, "the process still runs");
}

#[test]
fn guests_behind_a_bridge_reach_each_other_through_tap_and_veth() {
    in_netns(|| async {
        tool(&["ip", "link", "add", "br0", "type", "bridge", "forward_delay", "0"]);
        tool(&["ip", "link", "set", "br0", "up"]);
        tool(&["ip", "tuntap", "add", "t0", "mode", "tap"]);
        tool(&["ip", "link", "set", "t0", "master", "br0", "up"]);
        let one = Guest::on_tap("t0", "02:00:00:00:00:01").unwrap();
        let two = Guest::on_veth("v0", "02:00:00:00:00:02").unwrap();
        tool(&["ip", "link", "set", "v0", "master", "br0"]);
        one.address("10.1.0.1/24", None);
        two.address("10.1.0.2/24", None);
        assert!(one.pings("10.1.0.2"));
        assert!(one.received() > 0);
        assert!(!one.pings("10.1.0.3"), "nobody has this address");
        let answer =
            two.ns().within(|| async { tool(&["ip", "-br", "addr", "show", "eth0"]) }).await;
        assert!(answer.contains("10.1.0.2"), "{answer}");
    });
}
