-- From schema 5, written by kvrecall 0.1.0: tables, columns and JSON fields take the standard
-- terms. SQL functions that the runner provides (services/catalog/renames.py):
-- rename_in_outcome(json), rename_in_repair(json), rename_in_response(json).

ALTER TABLE calls RENAME COLUMN heard_at TO last_event_at;
ALTER TABLE calls RENAME COLUMN said TO consumed_in_turn;
ALTER TABLE calls RENAME TO tool_calls;
DROP INDEX calls_by_id;
DROP INDEX calls_by_silence;
CREATE INDEX tool_calls_by_id ON tool_calls (session, id, turn DESC);
CREATE INDEX tool_calls_by_last_event ON tool_calls (last_event_at)
WHERE status = 'pending' AND consumed_in_turn IS NULL;

ALTER TABLE shares RENAME COLUMN place TO position;
ALTER TABLE shares RENAME TO page_refs;
DROP INDEX shares_by_owner;
CREATE INDEX page_refs_by_owner ON page_refs (owner, pages);

ALTER TABLE kept RENAME TO retained_pages;

ALTER TABLE leftovers RENAME COLUMN kept TO keep_pages;
ALTER TABLE leftovers RENAME TO orphaned_pages;

ALTER TABLE answers RENAME COLUMN made TO created;
ALTER TABLE answers RENAME COLUMN answer TO response;
ALTER TABLE answers RENAME TO idempotency_records;

UPDATE turns SET outcome = rename_in_outcome(outcome);
UPDATE repairs SET report = rename_in_repair(report);
UPDATE idempotency_records SET response = rename_in_response(response);
