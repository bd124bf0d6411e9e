-- From version 14 to 15: the bytes that each tenant's sessions, conversations and responses take, as
-- running sums that quotas are checked against.

ALTER TABLE sessions ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE conversations ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0;
DROP TRIGGER session_added;
DROP TRIGGER session_changed;
DROP TRIGGER session_deleted;

UPDATE sessions SET bytes = length(CAST(settings AS BLOB))
+ (SELECT ifnull(sum(
    length(CAST(messages AS BLOB)) + length(token_ids) + length(CAST(outcome AS BLOB))
    + length(utterance_tokens)
), 0) FROM turns WHERE session = sessions.id)
+ (SELECT ifnull(sum(
    length(state)
), 0) FROM turn_states WHERE session = sessions.id)
+ (SELECT ifnull(sum(
    length(state)
), 0) FROM worker_states WHERE session = sessions.id)
+ (SELECT ifnull(sum(
    length(CAST(arguments AS BLOB)) + ifnull(length(CAST(result AS BLOB)), 0)
    + length(CAST(running AS BLOB)) + length(CAST(output AS BLOB))
    + length(CAST(call_signal AS BLOB))
), 0) FROM tool_calls WHERE session = sessions.id)
+ (SELECT ifnull(sum(
    length(CAST(text AS BLOB))
), 0) FROM tool_output WHERE session = sessions.id)
+ (SELECT ifnull(sum(
    length(CAST(report AS BLOB)) + length(CAST(signal AS BLOB)) + length(positions)
), 0) FROM repairs WHERE session = sessions.id)
+ (SELECT ifnull(sum(
    length(vector)
), 0) FROM segments WHERE session = sessions.id)
+ (SELECT ifnull(sum(
    length(built)
), 0) FROM built_episodes WHERE session = sessions.id)
+ (SELECT ifnull(sum(
    length(CAST(opening AS BLOB)) + length(CAST(history AS BLOB))
    + length(CAST(body AS BLOB))
), 0) FROM responses WHERE session = sessions.id);
UPDATE conversations SET bytes = length(CAST(metadata AS BLOB))
+ (SELECT ifnull(sum(length(CAST(body AS BLOB))), 0) FROM conversation_items
   WHERE conversation = conversations.id);

DROP TABLE tenants;
CREATE TABLE tenants (
    tenant TEXT PRIMARY KEY,
    sessions INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    conversations INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0
) STRICT;
INSERT INTO tenants (tenant, sessions, tokens, bytes)
SELECT tenant, count(*), sum(length), sum(bytes) FROM sessions GROUP BY tenant;
INSERT INTO tenants (tenant, sessions, tokens, conversations, bytes)
SELECT tenant, 0, 0, count(*), sum(bytes) FROM conversations WHERE true GROUP BY tenant
ON CONFLICT (tenant) DO UPDATE
SET conversations = excluded.conversations, bytes = bytes + excluded.bytes;

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
    length(NEW.state)
    WHERE id = NEW.session;
END;
CREATE TRIGGER worker_state_changed AFTER UPDATE OF state ON worker_states BEGIN
    UPDATE sessions SET bytes = bytes +
    (length(NEW.state)) -
    (length(OLD.state))
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
