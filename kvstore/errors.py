"""The exception tree of the row store. Every refusal is one of these; none of them loses a stored row."""


class KvStoreError(Exception):
    """Anything the row store refuses or fails at."""


class TierSettingsError(KvStoreError, ValueError):
    """Tiers cannot be put together, or reached, as they were described."""


class RowShapeError(KvStoreError):
    """Rows, positions or a session name do not fit the layout they were given to."""


class RowRangeError(KvStoreError):
    """A position or a length lies outside the rows that the session has."""


class PageError(KvStoreError):
    """A page cannot be used. Its rows must be computed again from the tokens."""


class PageFormatError(PageError):
    """The bytes are no page of this format version."""


class ForeignPageError(PageError):
    """The page belongs to another model, layout or dtype."""


class CorruptPageError(PageError):
    """A checksum does not hold, or the page may be older than a record that cannot be read any more."""


class LostPageError(PageError):
    """No tier holds the page in the version that the session expects."""


class TierError(KvStoreError):
    """A tier could not do what it was asked to do. What it had acknowledged before still stands."""


class TierFullError(TierError):
    """A tier has no room for a page and may drop none of those it holds."""


class TierFailedError(TierError):
    """The device, file system or server under a tier failed."""


class StaleWriterError(TierError):
    """The session was taken over: whoever writes it now does so under a later epoch."""


class DirectoryLockedError(KvStoreError):
    """Another process owns the directory of an NVMe tier."""


class StoreClosedError(KvStoreError):
    """The store or tier was closed."""


class InvariantError(KvStoreError):
    """check() found the store's own books in disagreement."""
