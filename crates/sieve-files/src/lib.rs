//! Files that appear whole or not at all, locks on files, free disk space, numbers that only Python writes into JSON,
//! and what lies in the place of a file that was fetched wrongly.
//!
//! A file or folder is written under a temporary name in the same folder, synced, then renamed. After a crash there is
//! the old one or the new one, never a part. The temporary name is
//! - `<path>.tmp` in Sieve's own folders, where one process writes at a time; the next attempt replaces the file of a
//!   killed one;
//! - `<path>.<process id>.tmp` at a path that the user named, where two programs may write at the same time; the last
//!   one wins. A symbolic link stays, and the file that it points to is replaced.
//!
//! The temporary file is removed after an error. [`sync_folder`] makes renames durable; functions that rename a single
//! file call it themselves.

mod atomic_file;
mod error;
mod in_place_of;
mod lock;
mod python_number;
mod read;
mod room;
mod write;

pub use atomic_file::{AtomicFile, FinishedFile, temporary_name};
pub use error::FileError;
pub use in_place_of::{in_place_of, lfs_pointer};
pub use lock::{Taken, lock_or_wait, try_lock};
pub use python_number::python_number;
pub use read::{no_file, open_file, read_file, read_text, special_file};
pub use room::free_bytes;
pub use write::{
    check_replaceable, is_pipe_or_device, publish_folder, replace, sync_folder, write_atomically, write_pieces_synced,
    write_synced,
};
