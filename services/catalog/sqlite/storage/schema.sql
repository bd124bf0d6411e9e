-- The schema of the SQLite catalog. A change here needs another SCHEMA_VERSION in schema.py, and after
-- the first release a migration in services/catalog/migrations/.

-- Columns of type ANY have texts, or bytes where they are encrypted (services/catalog/encryption/cipher.py).

-- One row: an id that no other catalog has. Workers' pages belong to the catalog of one id, and their
-- ids follow from its secret, which may be wrapped by a key of the operator's.
CREATE TABLE catalog_id (
    id TEXT NOT NULL,
    secret BLOB NOT NULL
) STRICT;

-- The data keys of tenants, each wrapped by a key of the operator's.
CREATE TABLE data_keys (
    tenant TEXT PRIMARY KEY,
    wrapped BLOB NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL,
    settings ANY NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    turns INTEGER NOT NULL,
    memory TEXT NOT NULL,
    output_due INTEGER NOT NULL,
    worker TEXT NOT NULL,
    tenant TEXT NOT NULL,
    length INTEGER NOT NULL,
    -- In Unix seconds; NULL: never.
    expires_at REAL,
    bytes INTEGER NOT NULL DEFAULT 0,
    -- The id of the session's last page; NULL: it has none.
    last_page BLOB
) STRICT;
CREATE INDEX sessions_by_age ON sessions (tenant, created_at DESC, id DESC);
CREATE INDEX sessions_by_creation ON sessions (created_at, id);
CREATE INDEX sessions_by_expiry ON sessions (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX sessions_of_tenants_by_expiry ON sessions (tenant, expires_at)
WHERE expires_at IS NOT NULL;

-- What each tenant has, kept by the triggers below: quotas are checked against it.
CREATE TABLE tenants (
    tenant TEXT PRIMARY KEY,
    sessions INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    conversations INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TRIGGER session_added AFTER INSERT ON sessions BEGIN
    INSERT INTO tenants (tenant, sessions, tokens) VALUES (NEW.tenant, 1, NEW.length)
    ON CONFLICT (tenant) DO UPDATE SET sessions = sessions + 1, tokens = tokens + NEW.length;
    UPDATE sessions SET bytes = length(CAST(NEW.settings AS BLOB)) WHERE id = NEW.id;
END;
CREATE TRIGGER session_changed AFTER UPDATE OF length, bytes ON sessions BEGIN
    UPDATE tenants SET tokens = tokens + NEW.length - OLD.length, bytes = bytes + NEW.bytes - OLD.bytes
    WHERE tenant = NEW.tenant;
END;
CREATE TRIGGER session_deleted AFTER DELETE ON sessions BEGIN
    UPDATE tenants SET sessions = sessions - 1, tokens = tokens - OLD.length,
    bytes = bytes - OLD.bytes WHERE tenant = OLD.tenant;
    DELETE FROM tenants WHERE tenant = OLD.tenant AND sessions = 0 AND conversations = 0;
END;

-- `page_ids` are those of the state's pages, in order, 16 bytes each.
CREATE TABLE worker_states (
    session TEXT PRIMARY KEY REFERENCES sessions (id) ON DELETE CASCADE,
    state BLOB NOT NULL,
    page_ids BLOB NOT NULL
) STRICT;

-- Sessions that remember each other, by the name of their memory.
CREATE TABLE memories (
    session TEXT PRIMARY KEY REFERENCES sessions (id) ON DELETE CASCADE,
    name TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX memories_by_name ON memories (name);

-- The tree of all sessions' pages (services/catalog/page_tree.py). `parent` is the page before (NULL: none), `refs`
-- counts the sessions that end with the page and the pages that follow it.
CREATE TABLE pages (
    id BLOB PRIMARY KEY,
    parent BLOB,
    refs INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Pages that no session has any more and that workers may still store, in the order of their `number`.
CREATE TABLE dead_pages (
    number INTEGER PRIMARY KEY,
    id BLOB NOT NULL UNIQUE
) STRICT;

-- Worker states at the ends of some turns, compressed, for forks there.
CREATE TABLE turn_states (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    turn INTEGER NOT NULL,
    state BLOB NOT NULL,
    PRIMARY KEY (session, turn)
) STRICT;

-- The checksum of `utterance_tokens` covers `messages` and `outcome`, too.
CREATE TABLE turns (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    messages ANY NOT NULL,
    token_ids BLOB NOT NULL,
    outcome ANY NOT NULL,
    utterance_tokens BLOB NOT NULL,
    PRIMARY KEY (session, number)
) STRICT, WITHOUT ROWID;

-- `arguments` are those the model generated, `running` those the client executes ('': the same).
-- `output` are numbers of the pieces in `tool_output`.
CREATE TABLE tool_calls (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    turn INTEGER NOT NULL,
    position INTEGER NOT NULL,
    id TEXT NOT NULL,
    name ANY NOT NULL,
    arguments ANY NOT NULL,
    status TEXT NOT NULL,
    result ANY,
    started INTEGER NOT NULL,
    running ANY NOT NULL,
    output TEXT NOT NULL,
    last_event_at REAL NOT NULL,
    batch INTEGER NOT NULL,
    call_signal ANY NOT NULL,
    delta_due INTEGER NOT NULL,
    delta_repaired INTEGER NOT NULL,
    result_repaired INTEGER NOT NULL,
    consumed_in_turn INTEGER,
    PRIMARY KEY (session, turn, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX tool_calls_by_id ON tool_calls (session, id, turn DESC);
CREATE INDEX tool_calls_by_last_event ON tool_calls (last_event_at)
WHERE status = 'pending' AND consumed_in_turn IS NULL;

CREATE TABLE tool_output (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    turn INTEGER NOT NULL,
    position INTEGER NOT NULL,
    piece INTEGER NOT NULL,
    text ANY NOT NULL,
    PRIMARY KEY (session, turn, position, piece)
) STRICT, WITHOUT ROWID;

CREATE TABLE repairs (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    turn INTEGER NOT NULL,
    at REAL NOT NULL,
    report TEXT NOT NULL,
    signal ANY NOT NULL,
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
    medoid ANY NOT NULL,
    matched INTEGER NOT NULL,
    PRIMARY KEY (session, number)
) STRICT, WITHOUT ROWID;

-- Apart from `episodes`: the rows are large, and only an episode switch reads them.
CREATE TABLE built_episodes (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    episode TEXT NOT NULL,
    built BLOB NOT NULL,
    PRIMARY KEY (session, episode)
) STRICT;

-- `digest` is that of the conversation up to the end of the turn.
CREATE TABLE histories (
    digest TEXT PRIMARY KEY,
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    turn INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX histories_by_session ON histories (session);

-- `history` is the digest of the conversation up to the end of the turn, `expires_at` in Unix seconds.
CREATE TABLE responses (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    turn INTEGER NOT NULL,
    opening ANY NOT NULL,
    history ANY NOT NULL,
    hidden INTEGER NOT NULL,
    body ANY NOT NULL,
    expires_at REAL NOT NULL
) STRICT;
CREATE INDEX responses_by_session ON responses (session);
CREATE INDEX responses_by_age ON responses (expires_at);

-- `metadata` is a JSON object, `created_at` in Unix seconds.
CREATE TABLE conversations (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    metadata ANY NOT NULL,
    bytes INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX conversations_by_tenant ON conversations (tenant);

-- `position` counts up; a deleted item leaves a gap.
CREATE TABLE conversation_items (
    conversation TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    id TEXT NOT NULL,
    body ANY NOT NULL,
    PRIMARY KEY (conversation, position),
    UNIQUE (conversation, id)
) STRICT;

-- `created` is the session that the request created ('': none), `stored_at` in Unix seconds.
CREATE TABLE idempotency_records (
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    created TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    response TEXT NOT NULL,
    stored_at REAL NOT NULL,
    PRIMARY KEY (scope, key)
) STRICT;
CREATE INDEX idempotency_records_by_age ON idempotency_records (stored_at);

-- `digest` verifies the secret part of a key, `scopes` is a JSON list; times in Unix seconds. The
-- process that owns the file is not the only one that writes here: `kvrecall keys` does too.
CREATE TABLE api_keys (
    id TEXT PRIMARY KEY,
    digest TEXT NOT NULL,
    pepper TEXT NOT NULL,
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    scopes TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL,
    revoked_at REAL,
    last_used_at REAL
) STRICT, WITHOUT ROWID;

-- The bytes of what is stored of a session or a conversation: `bytes` of its row, kept by these
-- triggers. Rows that go with a session change nothing, as its own row is gone by then.
CREATE TRIGGER turn_added AFTER INSERT ON turns BEGIN
    UPDATE sessions SET bytes = bytes +
    length(CAST(NEW.messages AS BLOB)) + length(NEW.token_ids)
    + length(CAST(NEW.outcome AS BLOB)) + length(NEW.utterance_tokens)
    WHERE id = NEW.session;
END;
CREATE TRIGGER turn_deleted AFTER DELETE ON turns BEGIN
    UPDATE sessions SET bytes = bytes -
    (length(CAST(OLD.messages AS BLOB)) + length(OLD.token_ids)
    + length(CAST(OLD.outcome AS BLOB)) + length(OLD.utterance_tokens))
    WHERE id = OLD.session;
END;
CREATE TRIGGER turn_state_added AFTER INSERT ON turn_states BEGIN
    UPDATE sessions SET bytes = bytes +
    length(NEW.state)
    WHERE id = NEW.session;
END;
CREATE TRIGGER turn_state_deleted AFTER DELETE ON turn_states BEGIN
    UPDATE sessions SET bytes = bytes -
    (length(OLD.state))
    WHERE id = OLD.session;
END;
CREATE TRIGGER worker_state_added AFTER INSERT ON worker_states BEGIN
    UPDATE sessions SET bytes = bytes +
    length(NEW.state) + length(NEW.page_ids)
    WHERE id = NEW.session;
END;
CREATE TRIGGER worker_state_changed AFTER UPDATE OF state, page_ids ON worker_states BEGIN
    UPDATE sessions SET bytes = bytes +
    (length(NEW.state) + length(NEW.page_ids)) -
    (length(OLD.state) + length(OLD.page_ids))
    WHERE id = NEW.session;
END;
CREATE TRIGGER tool_call_added AFTER INSERT ON tool_calls BEGIN
    UPDATE sessions SET bytes = bytes +
    length(CAST(NEW.arguments AS BLOB)) + ifnull(length(CAST(NEW.result AS BLOB)), 0)
    + length(CAST(NEW.running AS BLOB)) + length(CAST(NEW.output AS BLOB))
    + length(CAST(NEW.call_signal AS BLOB))
    WHERE id = NEW.session;
END;
CREATE TRIGGER tool_call_changed AFTER UPDATE OF arguments, result, running, output, call_signal ON tool_calls BEGIN
    UPDATE sessions SET bytes = bytes +
    (length(CAST(NEW.arguments AS BLOB)) + ifnull(length(CAST(NEW.result AS BLOB)), 0)
    + length(CAST(NEW.running AS BLOB)) + length(CAST(NEW.output AS BLOB))
    + length(CAST(NEW.call_signal AS BLOB))) -
    (length(CAST(OLD.arguments AS BLOB)) + ifnull(length(CAST(OLD.result AS BLOB)), 0)
    + length(CAST(OLD.running AS BLOB)) + length(CAST(OLD.output AS BLOB))
    + length(CAST(OLD.call_signal AS BLOB)))
    WHERE id = NEW.session;
END;
CREATE TRIGGER tool_output_added AFTER INSERT ON tool_output BEGIN
    UPDATE sessions SET bytes = bytes +
    length(CAST(NEW.text AS BLOB))
    WHERE id = NEW.session;
END;
CREATE TRIGGER repair_added AFTER INSERT ON repairs BEGIN
    UPDATE sessions SET bytes = bytes +
    length(CAST(NEW.report AS BLOB)) + length(CAST(NEW.signal AS BLOB))
    + length(NEW.positions)
    WHERE id = NEW.session;
END;
CREATE TRIGGER repair_deleted AFTER DELETE ON repairs BEGIN
    UPDATE sessions SET bytes = bytes -
    (length(CAST(OLD.report AS BLOB)) + length(CAST(OLD.signal AS BLOB))
    + length(OLD.positions))
    WHERE id = OLD.session;
END;
CREATE TRIGGER segment_added AFTER INSERT ON segments BEGIN
    UPDATE sessions SET bytes = bytes +
    length(NEW.vector)
    WHERE id = NEW.session;
END;
CREATE TRIGGER segment_deleted AFTER DELETE ON segments BEGIN
    UPDATE sessions SET bytes = bytes -
    (length(OLD.vector))
    WHERE id = OLD.session;
END;
CREATE TRIGGER built_episode_added AFTER INSERT ON built_episodes BEGIN
    UPDATE sessions SET bytes = bytes +
    length(NEW.built)
    WHERE id = NEW.session;
END;
CREATE TRIGGER built_episode_deleted AFTER DELETE ON built_episodes BEGIN
    UPDATE sessions SET bytes = bytes -
    (length(OLD.built))
    WHERE id = OLD.session;
END;
CREATE TRIGGER response_added AFTER INSERT ON responses BEGIN
    UPDATE sessions SET bytes = bytes +
    length(CAST(NEW.opening AS BLOB)) + length(CAST(NEW.history AS BLOB))
    + length(CAST(NEW.body AS BLOB))
    WHERE id = NEW.session;
END;
CREATE TRIGGER response_deleted AFTER DELETE ON responses BEGIN
    UPDATE sessions SET bytes = bytes -
    (length(CAST(OLD.opening AS BLOB)) + length(CAST(OLD.history AS BLOB))
    + length(CAST(OLD.body AS BLOB)))
    WHERE id = OLD.session;
END;
CREATE TRIGGER conversation_added AFTER INSERT ON conversations BEGIN
    INSERT INTO tenants (tenant, sessions, tokens, conversations) VALUES (NEW.tenant, 0, 0, 1)
    ON CONFLICT (tenant) DO UPDATE SET conversations = conversations + 1;
    UPDATE conversations SET bytes = length(CAST(NEW.metadata AS BLOB)) WHERE id = NEW.id;
END;
CREATE TRIGGER conversation_described AFTER UPDATE OF metadata ON conversations BEGIN
    UPDATE conversations SET bytes = bytes + length(CAST(NEW.metadata AS BLOB)) -
    length(CAST(OLD.metadata AS BLOB)) WHERE id = NEW.id;
END;
CREATE TRIGGER conversation_changed AFTER UPDATE OF bytes ON conversations BEGIN
    UPDATE tenants SET bytes = bytes + NEW.bytes - OLD.bytes WHERE tenant = NEW.tenant;
END;
CREATE TRIGGER conversation_deleted AFTER DELETE ON conversations BEGIN
    UPDATE tenants SET conversations = conversations - 1, bytes = bytes - OLD.bytes
    WHERE tenant = OLD.tenant;
    DELETE FROM tenants WHERE tenant = OLD.tenant AND sessions = 0 AND conversations = 0;
END;
CREATE TRIGGER item_added AFTER INSERT ON conversation_items BEGIN
    UPDATE conversations SET bytes = bytes + length(CAST(NEW.body AS BLOB))
    WHERE id = NEW.conversation;
END;
CREATE TRIGGER item_deleted AFTER DELETE ON conversation_items BEGIN
    UPDATE conversations SET bytes = bytes - length(CAST(OLD.body AS BLOB))
    WHERE id = OLD.conversation;
END;
