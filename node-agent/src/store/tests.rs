use reconciler::wanted::{Kind, VolumeSpec, WantedSpec};
use rusqlite::Connection;

use super::*;

fn volume(name: &str, number: u128) -> Wanted {
    let spec = serde_json::from_value::<VolumeSpec>(serde_json::json!({"size_gib": 1})).unwrap();
    let uuid = Uuid::from_bytes(number.to_be_bytes()).unwrap();
    Wanted::new(uuid, name.parse().unwrap(), WantedSpec::Volume(spec))
}

fn key(name: &str) -> Key {
    Key::new(Kind::Volume, name.parse().unwrap())
}

fn put(object: Wanted) -> Vec<Op> {
    vec![Op::Put(vec![object])]
}

fn names(store: &Store) -> Vec<String> {
    store.snapshot().iter().map(|object| object.name.to_string()).collect()
}

async fn filled(dir: &Path) {
    let store = Store::open(dir).unwrap();
    store.commit(put(volume("one", 1))).await.unwrap();
    store.commit(put(volume("two", 2))).await.unwrap();
}

fn digest(dir: &Path) -> Vec<u8> {
    std::fs::read(dir.join(FILE_NAME)).unwrap()
}

#[tokio::test]
async fn what_a_crash_left_half_made_goes_and_what_is_not_the_stores_stays() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path()).await;
    let left = [".tmp-1-0-wanted.db", ".tmp-1-0-wanted.db-journal", ".tmp-2-3-wanted.db.schema-1"];
    let others = ["wanted.db.schema-1", ".tmp-1-0-node-id", "tmp-1-0-wanted.db"];
    for name in left.iter().chain(&others) {
        std::fs::write(dir.path().join(name), "half").unwrap();
    }
    let store = Store::open(dir.path()).unwrap();
    assert_eq!(names(&store), ["one", "two"]);
    let there = |name: &&str| dir.path().join(name).exists();
    assert!(!left.iter().any(there), "half-made files are gone");
    assert!(others.iter().all(there), "the others are there");
}

#[tokio::test]
async fn what_was_committed_is_there_after_a_restart_with_its_revision() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    assert!(store.is_fresh());
    assert_eq!(store.commit(put(volume("one", 1))).await.unwrap(), 1);
    assert_eq!(store.commit(put(volume("two", 2))).await.unwrap(), 2);
    let seen = store.revision();
    assert_eq!(*seen.borrow(), 2);
    drop(store);
    let store = Store::open(dir.path()).unwrap();
    assert!(!store.is_fresh());
    assert_eq!(names(&store), ["one", "two"]);
    assert_eq!(*store.revision().borrow(), 2);
}

#[tokio::test]
async fn the_files_are_private() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let store = Store::open(&state).unwrap();
    store.commit(put(volume("one", 1))).await.unwrap();
    assert_eq!(std::fs::metadata(&state).unwrap().mode() & 0o777, 0o700);
    for entry in std::fs::read_dir(&state).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(entry.metadata().unwrap().mode() & 0o777, 0o600, "{:?}", entry.file_name());
    }
}

#[tokio::test]
async fn a_tombstone_is_dropped_only_if_it_is_still_that_tombstone() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let one = volume("one", 1);
    store.commit(put(one.clone())).await.unwrap();
    store.forget(&key("one"), one.uuid).await.unwrap();
    assert_eq!(names(&store), ["one"], "it is no tombstone");
    store.commit(put(one.deleted())).await.unwrap();
    store.forget(&key("one"), volume("x", 9).uuid).await.unwrap();
    assert_eq!(names(&store), ["one"], "it is another identity's");
    store.forget(&key("one"), one.uuid).await.unwrap();
    assert!(names(&store).is_empty());
    store.forget(&key("one"), one.uuid).await.unwrap();
    drop(store);
    assert!(names(&Store::open(dir.path()).unwrap()).is_empty());
}

#[tokio::test]
async fn a_successor_takes_the_place_of_its_tombstone_and_a_done_request_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let (one, next) = (volume("one", 1), volume("one", 2));
    store.commit(put(one.deleted().with_successor(next.clone()))).await.unwrap();
    store.forget(&key("one"), one.uuid).await.unwrap();
    let mut asked = (**store.snapshot().get(&key("one")).unwrap()).clone();
    assert_eq!(asked.uuid, next.uuid);
    asked.reboots = 3;
    store.commit(put(asked.clone())).await.unwrap();
    store.acknowledge(&key("one"), one.uuid, Done::all_of(&asked)).await.unwrap();
    assert_eq!(store.snapshot().get(&key("one")).unwrap().reboots_done, 0);
    store.acknowledge(&key("one"), next.uuid, Done::all_of(&asked)).await.unwrap();
    drop(store);
    let again = Store::open(dir.path()).unwrap().snapshot();
    assert_eq!(again.get(&key("one")).unwrap().reboots_done, 3);
}

#[tokio::test]
async fn two_objects_of_one_identity_are_refused_and_the_old_state_stays() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    store.commit(put(volume("one", 1))).await.unwrap();
    let error = store.commit(put(volume("two", 1))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    assert_eq!(names(&store), ["one"]);
    store.commit(put(volume("three", 3))).await.unwrap();
}

#[tokio::test]
async fn many_requests_at_once_are_all_committed() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(Store::open(dir.path()).unwrap());
    let tasks: Vec<_> = (1..=300_u128)
        .map(|number| {
            let store = Arc::clone(&store);
            tokio::spawn(
                async move { store.commit(put(volume(&format!("v{number}"), number))).await },
            )
        })
        .collect();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    drop(store);
    assert_eq!(names(&Store::open(dir.path()).unwrap()).len(), 300);
}

#[tokio::test]
async fn a_second_agent_is_refused_and_told_the_pid_also_through_a_link() {
    let dir = tempfile::tempdir().unwrap();
    let (state, link) = (dir.path().join("state"), dir.path().join("link"));
    let held = Store::open(&state).unwrap();
    std::os::unix::fs::symlink(&state, &link).unwrap();
    for path in [&state, &link] {
        let error = Store::open(path).unwrap_err().to_string();
        assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
    }
    drop(held);
    Store::open(&link).unwrap();
}

#[tokio::test]
async fn a_holder_whose_lock_file_was_replaced_writes_nothing_more_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let first = Store::open(dir.path()).unwrap();
    let lost = first.lost();
    std::fs::remove_file(dir.path().join(LOCK_NAME)).unwrap();
    let second = Store::open(dir.path()).unwrap();
    let error = first.commit(put(volume("one", 1))).await.unwrap_err();
    assert!(error.to_string().contains("another agent may have it"), "{error}");
    assert!(lost.borrow().is_some());
    assert!(!first.holds_lock() && second.holds_lock());
    second.commit(put(volume("two", 2))).await.unwrap();
    assert_eq!(names(&second), ["two"]);
}

#[tokio::test]
async fn a_newer_store_is_not_changed_and_both_versions_are_named() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path()).await;
    let raw = Connection::open(dir.path().join(FILE_NAME)).unwrap();
    raw.pragma_update(None, "user_version", 99).unwrap();
    raw.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").unwrap();
    drop(raw);
    let before = digest(dir.path());
    let store = Store::open(dir.path()).unwrap();
    let Access::ReadOnly(trouble) = store.access() else { panic!("{:?}", store.access()) };
    let text = trouble.to_string();
    assert!(text.contains("schema 99") && text.contains("schema 1"), "{text}");
    assert_eq!(store.commit(put(volume("x", 5))).await.unwrap_err().kind(), ErrorKind::Unavailable);
    drop(store);
    assert_eq!(digest(dir.path()), before);
}

#[tokio::test]
async fn one_row_of_a_newer_agent_makes_the_store_readable_only() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path()).await;
    let raw = Connection::open(dir.path().join(FILE_NAME)).unwrap();
    raw.execute("UPDATE object SET schema = 7 WHERE name = 'two'", []).unwrap();
    drop(raw);
    let store = Store::open(dir.path()).unwrap();
    assert_eq!(*store.access(), Access::ReadOnly(Trouble::Newer { found: 7 }));
    assert_eq!(names(&store), ["one"], "what can be read is shown");
}

#[tokio::test]
async fn a_damaged_store_is_left_as_it_is_and_what_can_be_read_is_shown() {
    type Damage = fn(&Path);
    let cases: [(&str, Damage); 4] = [
        ("another file", |path| {
            std::fs::write(
                path,
                r#"{"schema_version": 99, "written_by": "agent 9.9.9"}"#.repeat(40),
            )
            .unwrap();
        }),
        ("another database", |path| {
            std::fs::remove_file(path).unwrap();
            Connection::open(path).unwrap().execute_batch("CREATE TABLE t (x)").unwrap();
        }),
        ("a page of noise", |path| {
            use std::os::unix::fs::FileExt;
            let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
            file.write_all_at(&[0xA5; 4096], 4096).unwrap();
        }),
        ("a document that is none", |path| {
            let raw = Connection::open(path).unwrap();
            raw.execute("UPDATE object SET document = '{' WHERE name = 'two'", []).unwrap();
            raw.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").unwrap();
        }),
    ];
    for (what, damage) in cases {
        let dir = tempfile::tempdir().unwrap();
        filled(dir.path()).await;
        damage(&dir.path().join(FILE_NAME));
        let before = digest(dir.path());
        let store = Store::open(dir.path()).unwrap();
        let Access::ReadOnly(Trouble::Damaged { .. }) = store.access() else {
            panic!("{what}: {:?}", store.access())
        };
        let error = store.commit(put(volume("x", 5))).await.unwrap_err().to_string();
        assert!(error.contains("move wanted.db of the state directory aside"), "{what}: {error}");
        if what.starts_with("a document") {
            assert_eq!(names(&store), ["one"]);
        }
        drop(store);
        assert_eq!(digest(dir.path()), before, "{what}");
    }
}

#[tokio::test]
async fn an_older_store_is_migrated_once_with_a_copy_and_a_failed_step_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path()).await;
    let path = dir.path().join(FILE_NAME);
    let good: database::Migration =
        |connection| connection.execute("UPDATE object SET name = name", []).map(drop);
    let bad: database::Migration =
        |connection| connection.execute_batch("DELETE FROM object; SELECT * FROM missing;");
    let version = || -> i64 {
        let raw = Connection::open(&path).unwrap();
        raw.query_row("PRAGMA user_version", [], |row| row.get(0)).unwrap()
    };

    let error = database::open_as(&path, 3, &[good, bad]).unwrap_err();
    assert!(matches!(error, OpenError::Database { .. }), "{error}");
    assert_eq!(version(), 1);
    assert_eq!(names(&Store::open(dir.path()).unwrap()), ["one", "two"]);

    let opened = database::open_as(&path, 3, &[good, good]).unwrap();
    assert_eq!(opened.objects.len(), 2);
    drop(opened);
    assert_eq!(version(), 3);
    let copy = dir.path().join("wanted.db.schema-1");
    let kept = database::open_as(&copy, 1, &[]).unwrap();
    assert_eq!(kept.objects.len(), 2, "the copy is whole");
    drop(kept);

    let again = database::open_as(&path, 3, &[bad, bad]).unwrap();
    assert_eq!(again.objects.len(), 2, "a second start migrates nothing");
}

#[tokio::test]
async fn a_full_disk_refuses_the_request_and_keeps_the_old_state() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path()).await;
    // SQLite's own bound gives the same error path as a full device: SQLITE_FULL.
    let raw = Connection::open(dir.path().join(FILE_NAME)).unwrap();
    raw.execute_batch("PRAGMA journal_mode = WAL").unwrap();
    let pages: i64 = raw.query_row("PRAGMA page_count", [], |row| row.get(0)).unwrap();
    raw.query_row(&format!("PRAGMA max_page_count = {pages}"), [], |row| row.get::<_, i64>(0))
        .unwrap();
    let shared = Arc::new(Shared {
        set: Mutex::new(WantedSet::default()),
        revision: watch::Sender::new(2),
        lost: watch::Sender::new(None),
    });
    let lock = Arc::new(FileLock::try_exclusive(&dir.path().join(LOCK_NAME)).unwrap());
    let writer = writer::Writer::start(raw, &shared, &lock).unwrap();
    let mut large = volume("large", 7);
    large.labels = (0..60).map(|at| (format!("k{at}"), "x".repeat(255))).collect();
    let error = writer.commit(put(large)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted, "{error}");
    assert!(error.to_string().contains("no space is left"), "{error}");
    assert_eq!(*shared.revision.borrow(), 2);
    drop(writer);
    drop(lock);
    let store = Store::open(dir.path()).unwrap();
    assert_eq!(names(&store), ["one", "two"]);
    store.commit(put(volume("three", 3))).await.unwrap();
}
