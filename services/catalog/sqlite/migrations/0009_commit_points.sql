-- From schema 8: the commits of each epoch, which tell the rows of stored pages that were committed.
-- Of what was stored before, every version of a page counts up to the length that is committed now.

CREATE TABLE commit_points (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    epoch INTEGER NOT NULL,
    length INTEGER NOT NULL,
    PRIMARY KEY (session, epoch)
) STRICT, WITHOUT ROWID;
INSERT INTO commit_points SELECT id, 0, length FROM sessions WHERE length > 0;

-- Tables are made anew: a column that is added stands at another place than in a new file.
CREATE TABLE new_page_refs (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    owner TEXT NOT NULL,
    pages INTEGER NOT NULL,
    position INTEGER NOT NULL,
    history TEXT NOT NULL DEFAULT '[]',
    PRIMARY KEY (session, owner, position)
) STRICT, WITHOUT ROWID;
INSERT INTO new_page_refs SELECT session, owner, pages, position, '[]' FROM page_refs;
DROP TABLE page_refs;
ALTER TABLE new_page_refs RENAME TO page_refs;
CREATE INDEX page_refs_by_owner ON page_refs (owner, pages);

ALTER TABLE prefixes ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0;
