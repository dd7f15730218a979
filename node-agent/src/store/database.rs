//! The file: how it is looked at, made, migrated and read.

use std::path::{Path, PathBuf};

use drivers_api::Uuid;
use reconciler::wanted::Wanted;
use rusqlite::{Connection, ErrorCode, OpenFlags, params};

use super::{OpenError, Trouble};

/// The schema that this agent reads and writes. Stands in the header (`user_version`) and in each row.
pub const SCHEMA: i64 = 1;
/// Says in the header that the file is ours (`application_id`): "bcdn".
const APPLICATION_ID: i64 = 0x6263_646e;

const TABLES: &str = "
    CREATE TABLE object (
        kind TEXT NOT NULL,
        name TEXT NOT NULL,
        uuid TEXT NOT NULL UNIQUE,
        schema INTEGER NOT NULL,
        document TEXT NOT NULL,
        PRIMARY KEY (kind, name)
    ) WITHOUT ROWID;
    CREATE TABLE counter (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
    INSERT INTO counter VALUES ('revision', 0);
";

/// A step from one schema to the next.
pub(super) type Migration = fn(&Connection) -> rusqlite::Result<()>;

/// The steps: the one at index N leads from schema N + 1 to N + 2.
const MIGRATIONS: &[Migration] = &[];

/// A database with what it holds.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) state: State,
    pub(super) objects: Vec<Wanted>,
    pub(super) revision: u64,
    pub(super) fresh: bool,
}

#[derive(Debug)]
pub(super) enum State {
    Writable(Connection),
    Untouched(Trouble),
}

/// Opens the file: makes it when it is not there, migrates it when it is older, and leaves it as it is when it is newer or
/// damaged.
pub(super) fn open(path: &Path) -> Result<Opened, OpenError> {
    open_as(path, SCHEMA, MIGRATIONS)
}

pub(super) fn open_as(
    path: &Path,
    schema: i64,
    migrations: &[Migration],
) -> Result<Opened, OpenError> {
    let fail = |source| OpenError::Database { path: path.to_owned(), source };
    let fresh = std::fs::metadata(path).map_or(true, |found| found.len() == 0);
    if fresh {
        create(path, schema)?;
    }
    let (objects, revision, found) = match look(path, schema) {
        Ok(Seen::Good { objects, revision, schema }) => (objects, revision, schema),
        Ok(Seen::Trouble(trouble, objects)) => {
            let state = State::Untouched(trouble);
            return Ok(Opened { state, objects, revision: 0, fresh: false });
        }
        Err(error) if is_damage(&error) => {
            let trouble = Trouble::Damaged { reason: error.to_string() };
            let state = State::Untouched(trouble);
            return Ok(Opened { state, objects: Vec::new(), revision: 0, fresh: false });
        }
        Err(error) => return Err(fail(error)),
    };
    let mut connection = writable(path).map_err(fail)?;
    let objects = match objects {
        Some(objects) => objects,
        None => {
            migrate(path, &mut connection, found, schema, migrations)?;
            let rows = rows(&connection, schema).map_err(fail)?;
            if let Some(reason) = rows.unreadable {
                let state = State::Untouched(Trouble::Damaged { reason });
                return Ok(Opened { state, objects: rows.objects, revision: 0, fresh });
            }
            rows.objects
        }
    };
    Ok(Opened { state: State::Writable(connection), objects, revision, fresh })
}

/// Removes what a crash left half-made beside the database. The caller holds the directory's lock, so nobody writes there.
pub(super) fn sweep(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // The names that `host::files::temporary_beside` gives for the database, its copies and SQLite's journals of them.
        if !(name.starts_with(".tmp-") && name.contains(&format!("-{}", super::FILE_NAME))) {
            continue;
        }
        match host::files::remove_file(&path) {
            Ok(_) => {
                tracing::info!(file = %path.display(), "what a crash left half-made is removed");
            }
            // In nobody's way: the store opens all the same.
            Err(error) => {
                tracing::warn!(file = %path.display(), %error, "what a crash left half-made stays");
            }
        }
    }
}

/// Makes a whole database under another name, so that a crash leaves none or a whole one.
fn create(path: &Path, schema: i64) -> Result<(), OpenError> {
    let fail = |source| OpenError::Database { path: path.to_owned(), source };
    let step = |reason: String| OpenError::Step { path: path.to_owned(), reason };
    let temporary = host::files::temporary_beside(path);
    host::files::create_new(&temporary).map_err(OpenError::Directory)?;
    let made = (|| {
        let connection = Connection::open(&temporary)?;
        connection.execute_batch("PRAGMA synchronous = FULL; BEGIN IMMEDIATE;")?;
        connection.execute_batch(TABLES)?;
        connection.pragma_update(None, "application_id", APPLICATION_ID)?;
        connection.pragma_update(None, "user_version", schema)?;
        connection.execute_batch("COMMIT;")?;
        connection.close().map_err(|(_, error)| error)
    })();
    let placed = made.map_err(fail).and_then(|()| {
        host::fault::point("store.create.file-made").map_err(|error| step(error.to_string()))?;
        std::fs::rename(&temporary, path)
            .map_err(host::files::FileError::of("rename onto", path))
            .and_then(|()| host::files::sync_parent(path))
            .map_err(OpenError::Directory)
    });
    if placed.is_err() {
        // Best effort: the name is this process's alone.
        drop(std::fs::remove_file(&temporary));
    }
    placed
}

fn writable(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    // One writer, few rows: a small page cache keeps the idle agent small.
    connection.execute_batch(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA cache_size = -512; PRAGMA wal_autocheckpoint = 256;",
    )?;
    Ok(connection)
}

enum Seen {
    /// The objects are `None` for an older schema, which is read after its migration.
    Good {
        objects: Option<Vec<Wanted>>,
        revision: u64,
        schema: i64,
    },
    Trouble(Trouble, Vec<Wanted>),
}

/// Looks at the file without a write to it.
fn look(path: &Path, known: i64) -> rusqlite::Result<Seen> {
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    let number =
        |pragma: &str| connection.query_row(&format!("PRAGMA {pragma}"), [], |row| row.get(0));
    let application: i64 = number("application_id")?;
    let schema: i64 = number("user_version")?;
    let damaged = |reason: String| Seen::Trouble(Trouble::Damaged { reason }, Vec::new());
    if application != APPLICATION_ID {
        return Ok(damaged("it is no store of bcd-node".to_owned()));
    }
    if schema > known {
        return Ok(Seen::Trouble(Trouble::Newer { found: schema }, Vec::new()));
    }
    let check: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
    if check != "ok" {
        let objects = rows(&connection, known).map(|rows| rows.objects).unwrap_or_default();
        return Ok(Seen::Trouble(Trouble::Damaged { reason: check }, objects));
    }
    let revision = revision(&connection)?;
    if schema < known {
        return Ok(Seen::Good { objects: None, revision, schema });
    }
    let rows = rows(&connection, known)?;
    Ok(match (rows.newer, rows.unreadable) {
        (Some(found), _) => Seen::Trouble(Trouble::Newer { found }, rows.objects),
        (None, Some(reason)) => Seen::Trouble(Trouble::Damaged { reason }, rows.objects),
        (None, None) => Seen::Good { objects: Some(rows.objects), revision, schema },
    })
}

fn revision(connection: &Connection) -> rusqlite::Result<u64> {
    let value: i64 =
        connection
            .query_row("SELECT value FROM counter WHERE name = 'revision'", [], |row| row.get(0))?;
    Ok(u64::try_from(value).unwrap_or_default())
}

struct Rows {
    objects: Vec<Wanted>,
    /// What is wrong with the first row that cannot be read.
    unreadable: Option<String>,
    /// The schema of the first row that a newer agent wrote.
    newer: Option<i64>,
}

fn rows(connection: &Connection, known: i64) -> rusqlite::Result<Rows> {
    let mut statement =
        connection.prepare("SELECT kind, name, uuid, schema, document FROM object")?;
    let mut found = statement.query([])?;
    let mut rows = Rows { objects: Vec::new(), unreadable: None, newer: None };
    while let Some(row) = found.next()? {
        let (kind, name): (String, String) = (row.get(0)?, row.get(1)?);
        let (uuid, schema): (String, i64) = (row.get(2)?, row.get(3)?);
        let document: String = row.get(4)?;
        if schema > known {
            rows.newer.get_or_insert(schema);
            continue;
        }
        match serde_json::from_str::<Wanted>(&document) {
            Ok(object) if is_of(&object, &kind, &name, &uuid) => rows.objects.push(object),
            Ok(_) => {
                let reason = format!("the document of {kind} {name} is another object's");
                rows.unreadable.get_or_insert(reason);
            }
            Err(error) => {
                let reason = format!("the document of {kind} {name} cannot be read: {error}");
                rows.unreadable.get_or_insert(reason);
            }
        }
    }
    Ok(rows)
}

fn is_of(object: &Wanted, kind: &str, name: &str, uuid: &str) -> bool {
    object.spec.kind().as_str() == kind
        && object.name.as_str() == name
        && uuid.parse::<Uuid>().is_ok_and(|uuid| uuid == object.uuid)
}

/// Brings an older file to `schema`: a copy aside first, then all steps in one transaction.
fn migrate(
    path: &Path,
    connection: &mut Connection,
    found: i64,
    schema: i64,
    migrations: &[Migration],
) -> Result<(), OpenError> {
    let fail = |source| OpenError::Database { path: path.to_owned(), source };
    let step = |reason: String| OpenError::Step { path: path.to_owned(), reason };
    let copy = copy_aside(path, connection, found)?;
    host::fault::point("store.migrate.copied").map_err(|error| step(error.to_string()))?;
    tracing::info!(from = found, to = schema, copy = %copy.display(), "the store is migrated");
    let transaction = connection.transaction().map_err(fail)?;
    for from in found..schema {
        let migration = usize::try_from(from - 1).ok().and_then(|at| migrations.get(at));
        let migration =
            migration.ok_or_else(|| step(format!("no way leads from schema {from}")))?;
        migration(&transaction).map_err(fail)?;
        host::fault::point("store.migrate.stepped").map_err(|error| step(error.to_string()))?;
    }
    transaction.pragma_update(None, "user_version", schema).map_err(fail)?;
    transaction.execute("UPDATE object SET schema = ?1", params![schema]).map_err(fail)?;
    transaction.commit().map_err(fail)
}

/// Copies the database to `NAME.schema-N`, whole or not at all. A copy of an earlier try is replaced: the source is the
/// same, since a failed migration changes nothing.
fn copy_aside(path: &Path, connection: &Connection, schema: i64) -> Result<PathBuf, OpenError> {
    let fail = |source| OpenError::Database { path: path.to_owned(), source };
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".schema-{schema}"));
    let copy = path.with_file_name(name);
    let temporary = host::files::temporary_beside(&copy);
    // SQLite writes into an empty file that is there; made first, so that it is private from the start.
    let file = host::files::create_new(&temporary).map_err(OpenError::Directory)?;
    let target = temporary.to_string_lossy();
    let copied =
        connection.execute("VACUUM INTO ?1", params![target]).map_err(fail).and_then(|_| {
            file.sync_all()
                .and_then(|()| std::fs::rename(&temporary, &copy))
                .map_err(host::files::FileError::of("write", &copy))
                .and_then(|()| host::files::sync_parent(&copy))
                .map_err(OpenError::Directory)
        });
    if copied.is_err() {
        // Best effort: the name is this process's alone.
        drop(std::fs::remove_file(&temporary));
    }
    copied.map(|()| copy)
}

/// Whether the content of the file is at fault, rather than the host.
#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "a foreign enumeration: what is not known to be the content's fault is the host's"
)]
fn is_damage(error: &rusqlite::Error) -> bool {
    match error {
        rusqlite::Error::SqliteFailure(failure, _) => {
            matches!(
                failure.code,
                ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase | ErrorCode::SchemaChanged
            ) || failure.extended_code == rusqlite::ffi::SQLITE_ERROR
        }
        rusqlite::Error::SqlInputError { .. }
        | rusqlite::Error::QueryReturnedNoRows
        | rusqlite::Error::InvalidColumnType(..)
        | rusqlite::Error::FromSqlConversionFailure(..)
        | rusqlite::Error::Utf8Error(..) => true,
        _ => false,
    }
}
