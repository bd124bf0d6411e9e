-- From version 10 to 11: the conversations at the ends of turns, by which sessions are found again.

CREATE TABLE histories (
    digest TEXT PRIMARY KEY,
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    turn INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX histories_by_session ON histories (session);
