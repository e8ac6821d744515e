//! Files that appear whole or not at all, locks on files, and room for them.
//!
//! A file or folder is written under a temporary name beside its own, synced, and renamed, so a crash leaves the old
//! one or the new one. Which temporary name:
//! - in a folder that is Sieve's, `<path>.tmp`: one process writes there at a time, and the next attempt replaces what
//!   a killed one left;
//! - at a path that a person named, `<path>.<process id>.tmp`: two programs may write it at once, and the last one
//!   wins. A symbolic link stays a link, and the file that it leads to is replaced.
//!
//! An error removes the temporary file. [`sync_folder`] makes renames durable; every function here that renames one
//! file alone calls it.

mod atomic_file;
mod error;
mod lock;
mod room;
mod write;

pub use atomic_file::{AtomicFile, FinishedFile, temporary_name};
pub use error::FileError;
pub use lock::{Taken, try_lock};
pub use room::free_bytes;
pub use write::{
    check_replaceable, publish_folder, replace, sync_folder, write_atomically, write_pieces_synced, write_synced,
};
