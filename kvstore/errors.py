"""Exception tree of the row store: every refused or failed call raises one of these.

    KvStoreError
    ├── TierSettingsError      also a ValueError
    ├── IndexSettingsError     also a ValueError
    ├── RowShapeError
    ├── RowRangeError
    ├── PageError
    │   ├── PageFormatError
    │   │   └── PageVersionError
    │   ├── ForeignPageError
    │   ├── CorruptPageError
    │   ├── LockedPageError
    │   └── MissingPageError
    ├── TierError
    │   ├── TierFullError
    │   └── TierFailedError
    ├── DirectoryLockedError
    ├── StoreClosedError
    └── InvariantError

No error loses a row that was stored before.
"""


class KvStoreError(Exception):
    """Base class of every error that the row store raises."""


class TierSettingsError(KvStoreError, ValueError):
    """The configured tiers cannot be combined or reached."""


class IndexSettingsError(KvStoreError, ValueError):
    """A setting of an index over keys is out of range."""


class RowShapeError(KvStoreError):
    """Rows, positions or ids of pages do not fit the page layout."""


class RowRangeError(KvStoreError):
    """A position or a length lies outside the rows of the session."""


class PageError(KvStoreError):
    """A page cannot be used; its rows must be computed again from the tokens."""


class PageFormatError(PageError):
    """The bytes are not a page in a format that this program reads."""


class PageVersionError(PageFormatError):
    """The page is intact but was written in another format version."""


class ForeignPageError(PageError):
    """The page belongs to another model, shape or dtype."""


class CorruptPageError(PageError):
    """A checksum does not match."""


class LockedPageError(PageError):
    """The page is encrypted with a key that no session has brought."""


class MissingPageError(PageError):
    """No tier holds the page."""


class TierError(KvStoreError):
    """A tier could not complete a call; everything it acknowledged before is still stored."""


class TierFullError(TierError):
    """A tier has no room for a page and no page that it may drop."""


class TierFailedError(TierError):
    """The device, file system or server under a tier failed."""


class DirectoryLockedError(KvStoreError):
    """Another process owns the directory of an NVMe tier."""


class StoreClosedError(KvStoreError):
    """The store or the tier was closed."""


class InvariantError(KvStoreError):
    """A consistency check found that the store's accounting disagrees with its contents."""
