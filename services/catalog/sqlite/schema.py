"""The tables of the catalog on SQLite, and which version of them this code reads and writes."""

SCHEMA_VERSION = 5
APPLICATION_ID = 0x6B767263  # "kvrc": tells a catalog from any other SQLite file

TABLES = """
CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL,
    settings TEXT NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    turns INTEGER NOT NULL,
    memory TEXT NOT NULL,
    output_due INTEGER NOT NULL,
    worker TEXT NOT NULL,
    tenant TEXT NOT NULL,
    length INTEGER NOT NULL
) STRICT;
CREATE INDEX sessions_by_age ON sessions (tenant, created_at DESC, id DESC);
CREATE INDEX sessions_by_tenant ON sessions (tenant, length);

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
    utterance_tokens BLOB NOT NULL,
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
    running TEXT NOT NULL,
    pieces TEXT NOT NULL,
    last_event_at REAL NOT NULL,
    batch INTEGER NOT NULL,
    call_signal TEXT NOT NULL,
    delta_due INTEGER NOT NULL,
    delta_repaired INTEGER NOT NULL,
    result_repaired INTEGER NOT NULL,
    said INTEGER,
    PRIMARY KEY (session, turn, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX calls_by_id ON calls (session, id, turn DESC);
CREATE INDEX calls_by_silence ON calls (last_event_at) WHERE status = 'pending' AND said IS NULL;

CREATE TABLE repairs (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    turn INTEGER NOT NULL,
    at REAL NOT NULL,
    report TEXT NOT NULL,
    signal TEXT NOT NULL,
    positions BLOB NOT NULL,
    PRIMARY KEY (session, number)
) STRICT, WITHOUT ROWID;

CREATE TABLE episode_sets (
    session TEXT PRIMARY KEY REFERENCES sessions (id) ON DELETE CASCADE,
    segments INTEGER NOT NULL,
    built_segments INTEGER NOT NULL,
    builds INTEGER NOT NULL,
    next_token INTEGER NOT NULL,
    last_turn INTEGER NOT NULL,
    last_utterance INTEGER NOT NULL,
    dimensions INTEGER NOT NULL,
    active TEXT NOT NULL
) STRICT;

CREATE TABLE segments (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    start INTEGER NOT NULL,
    stop INTEGER NOT NULL,
    vector BLOB NOT NULL,
    label INTEGER NOT NULL,
    PRIMARY KEY (session, number)
) STRICT, WITHOUT ROWID;

CREATE TABLE episodes (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    id TEXT NOT NULL,
    centroid BLOB NOT NULL,
    segments INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    medoid TEXT NOT NULL,
    matched INTEGER NOT NULL,
    PRIMARY KEY (session, number)
) STRICT, WITHOUT ROWID;

-- Apart from `episodes`: they are large, and only a switch reads them.
CREATE TABLE built_episodes (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    episode TEXT NOT NULL,
    built BLOB NOT NULL,
    PRIMARY KEY (session, episode)
) STRICT;

-- The first pages of `owner` that a session uses: the parts of its lineage by `place`, -1 for what it may come to use.
CREATE TABLE shares (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    owner TEXT NOT NULL,
    pages INTEGER NOT NULL,
    place INTEGER NOT NULL,
    PRIMARY KEY (session, owner, place)
) STRICT, WITHOUT ROWID;
CREATE INDEX shares_by_owner ON shares (owner, pages);

-- Deleted sessions of which pages were still shared when somebody was told last, and how many.
CREATE TABLE kept (
    owner TEXT PRIMARY KEY,
    pages INTEGER NOT NULL
) STRICT;

CREATE TABLE leftovers (
    owner TEXT PRIMARY KEY,
    kept INTEGER NOT NULL
) STRICT;

CREATE TABLE prefixes (
    digest TEXT PRIMARY KEY,
    owner TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    token_ids BLOB NOT NULL
) STRICT;
CREATE INDEX prefixes_by_owner ON prefixes (owner);

-- `made` is the session that the request made (empty: none).
CREATE TABLE answers (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    made TEXT NOT NULL,
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
