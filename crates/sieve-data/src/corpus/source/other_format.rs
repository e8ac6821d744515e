//! Files in formats that are not read, recognised by their first bytes, and the way out of each.

use std::io::Read;
use std::path::Path;

use sieve_core::ShownPath;
use sieve_files::lfs_pointer;

use super::unpack::Packed;
use crate::error::DataError;

/// Bytes that are looked at.
const HEAD_BYTES: u64 = 512;

/// First bytes of packed files and what they are packed with, with the command that writes their contents.
const PACKINGS: [(&[u8], &str, &str); 4] = [
    (b"\xFD7zXZ\0", "xz", "xz -dc"),
    (b"\x04\x22\x4D\x18", "lz4", "lz4 -dc"),
    (b"BZh", "bzip2", "bzip2 -dc"),
    (b"\x1F\x9D", "compress", "uncompress -c"),
];
/// What follows `BZh` and a digit: text may begin with these letters too.
const BZIP2_BLOCK: &[u8] = b"1AY&SY";
/// Place and first bytes of the mark in a tar archive.
const TAR_MARK: (usize, &[u8]) = (257, b"ustar");

/// What a file is in place of text, JSON lines or Parquet, and how to get such a file of it.
pub(super) struct OtherFormat {
    pub(super) what: String,
    pub(super) hint: String,
}

impl OtherFormat {
    /// The format of a file; `None` if it is none of those that are known here, or cannot be read.
    pub(super) fn at(path: &Path) -> Option<Self> {
        let mut head = Vec::new();
        sieve_files::open_file(path).ok()?.take(HEAD_BYTES).read_to_end(&mut head).ok()?;
        if let Some((what, hint)) = lfs_pointer(&head) {
            return Some(Self { what: what.to_owned(), hint: hint.to_owned() });
        }
        Self::packed(path, &head).or_else(|| Self::of_contents(path, &head))
    }

    /// What the contents of a file are, by their first bytes, packed or not.
    pub(super) fn of_contents(path: &Path, head: &[u8]) -> Option<Self> {
        let shown = path.shown();
        let (what, hint) = match head {
            _ if head.starts_with(b"PK\x03\x04") => ("a zip archive", format!("unzip {shown} -d FOLDER")),
            // The name of the first file stands before the mark, with zeros behind it.
            _ if head.get(TAR_MARK.0..).is_some_and(|rest| rest.starts_with(TAR_MARK.1)) && head.contains(&0) => {
                ("a tar archive", format!("tar -xf {shown} -C FOLDER"))
            }
            _ if head.starts_with(b"ARROW1\0\0") => (
                "a file of Arrow",
                format!(
                    "python -c 'import pyarrow.feather as f, pyarrow.parquet as p; \
                     p.write_table(f.read_table(\"{shown}\"), \"NEW.parquet\")' makes Parquet of it"
                ),
            ),
            _ if head.starts_with(b"\xFF\xFF\xFF\xFF") && path.extension().is_some_and(|end| end == "arrow") => (
                "a stream of Arrow, as the package datasets keeps",
                format!(
                    "python -c 'import datasets; datasets.Dataset.from_file(\"{shown}\").to_parquet(\"NEW.parquet\")' \
                     makes Parquet of it"
                ),
            ),
            _ => return None,
        };
        let what = format!("it is {what}, and only text, JSON lines and Parquet are read");
        Some(Self { what, hint })
    }

    /// A packed file that is not unpacked here, or not by its name.
    fn packed(path: &Path, head: &[u8]) -> Option<Self> {
        let shown = path.shown();
        let own = Packed::of_contents(head);
        if let Some(packed) = own.filter(|packed| Packed::of(path).0 != Some(*packed)) {
            let (name, ending) = (packed.name(), packed.ending());
            let what = format!("it is packed with {name}, and its name does not end in .{ending}");
            return Some(Self { what, hint: format!("name it so: mv {shown} NAME.{ending}, as NAME.jsonl.{ending}") });
        }
        let is_bzip2 = head.get(4..).is_some_and(|rest| rest.starts_with(BZIP2_BLOCK));
        let found = PACKINGS.iter().find(|(mark, name, _)| head.starts_with(mark) && (*name != "bzip2" || is_bzip2));
        found.map(|(_, name, unpack)| Self {
            what: format!("it is packed with {name}, and .gz and .zst are unpacked"),
            hint: format!("{unpack} {shown} > NEW unpacks it, and {unpack} {shown} | zstd > NEW.zst packs it again"),
        })
    }
}

/// Refuses a file in another format.
///
/// # Errors
/// Such a file.
pub(in crate::corpus) fn refuse(path: &Path) -> Result<(), DataError> {
    match OtherFormat::at(path) {
        Some(OtherFormat { what, hint }) => {
            Err(DataError::BadFile { path: path.to_path_buf(), what, hint: hint.into() })
        }
        None => Ok(()),
    }
}
