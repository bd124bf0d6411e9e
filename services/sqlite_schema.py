"""The tables of the catalog on SQLite, and which version of them this code reads and writes."""

SCHEMA_VERSION = 1
APPLICATION_ID = 0x6B767263  # "kvrc": tells a catalog from any other SQLite file

TABLES = """
CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL,
    settings TEXT NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    turns INTEGER NOT NULL,
    memory TEXT NOT NULL
) STRICT;
CREATE INDEX sessions_by_age ON sessions (created_at DESC, id DESC);

CREATE TABLE worker_states (
    session TEXT PRIMARY KEY REFERENCES sessions (id) ON DELETE CASCADE,
    state BLOB NOT NULL
) STRICT;

CREATE TABLE turns (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    messages TEXT NOT NULL,
    token_ids BLOB NOT NULL,
    outcome TEXT NOT NULL,
    PRIMARY KEY (session, number)
) STRICT, WITHOUT ROWID;

CREATE TABLE calls (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    turn INTEGER NOT NULL,
    position INTEGER NOT NULL,
    id TEXT NOT NULL,
    name TEXT NOT NULL,
    arguments TEXT NOT NULL,
    status TEXT NOT NULL,
    result TEXT,
    started INTEGER NOT NULL,
    partial TEXT NOT NULL,
    batch INTEGER NOT NULL,
    call_repaired INTEGER NOT NULL,
    result_repaired INTEGER NOT NULL,
    said INTEGER,
    PRIMARY KEY (session, turn, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX calls_by_id ON calls (session, id, turn DESC);

CREATE TABLE repairs (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    after_turn INTEGER NOT NULL,
    number INTEGER NOT NULL,
    report TEXT NOT NULL,
    PRIMARY KEY (session, after_turn, number)
) STRICT, WITHOUT ROWID;

CREATE TABLE answers (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    answer TEXT NOT NULL,
    UNIQUE (scope, key)
) STRICT;
"""

PRAGMAS = (
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=FULL",
    "PRAGMA foreign_keys=ON",
    "PRAGMA busy_timeout=5000",
)
