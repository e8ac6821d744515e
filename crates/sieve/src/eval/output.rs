//! Files that a measure writes when it is done.
use anyhow::{Context, Result, bail};
use sieve_files::write_synced;
use std::path::Path;

/// Refuses a file that could not be written before the work is done for it.
pub(crate) fn check(path: Option<&Path>) -> Result<()> {
    let Some(path) = path else {
        return Ok(());
    };
    if path.is_dir() {
        bail!(
            "cannot write {}: it is a folder\n  hint: name a file in it",
            path.display()
        );
    }
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() && !parent.is_dir() => bail!(
            "cannot write {}: there is no folder {}\n  hint: make it first",
            path.display(),
            parent.display()
        ),
        _ => Ok(()),
    }
}

/// The same for a file that [`write`] makes, by making its neighbour and removing it again.
pub(crate) fn check_replaceable(path: &Path) -> Result<()> {
    check(Some(path))?;
    if path.file_name().is_none() || (path.exists() && !path.is_file()) {
        bail!(
            "cannot write {}: it is no file\n  hint: name a new file, or one to replace",
            path.display()
        );
    }
    sieve_files::check_replaceable(path).with_context(|| format!("cannot write {}", path.display()))
}

/// Writes a file whole or not at all.
pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    sieve_files::replace(path, |partial| write_synced(partial, text.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Text without the characters that XML gives a meaning, for pictures.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_file_is_replaced_whole_and_links_stay() {
        let name = format!("sieve-output-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir(&folder).expect("a new folder");
        let path = folder.join("a.json");
        check_replaceable(&path).expect("new");
        assert!(!path.exists());
        write(&path, "one, and longer").expect("writable");
        check_replaceable(&path).expect("there");
        write(&path, "two").expect("writable");
        assert_eq!(fs::read_to_string(&path).expect("there"), "two");
        #[cfg(unix)]
        {
            let link = folder.join("link");
            std::os::unix::fs::symlink(&path, &link).expect("linkable");
            write(&link, "three").expect("writable");
            assert!(link.is_symlink());
            assert_eq!(fs::read_to_string(&path).expect("there"), "three");
            check_replaceable(Path::new("/dev/null")).expect_err("a device");
        }
        let left = fs::read_dir(&folder).expect("there").count();
        assert_eq!(left, if cfg!(unix) { 2 } else { 1 });
        for bad in ["", "no/where.json", "a.json/x"] {
            let path = folder.join(bad);
            check_replaceable(&path).expect_err(bad);
        }
        fs::remove_dir_all(&folder).expect("its own folder");
    }
}
