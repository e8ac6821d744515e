//! What a release holds: `dist` and `wheel` each put their file into one folder, whose SHA256SUMS names all of them.
use crate::workspace::{self, entries, target_folder};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder in the build folder that `gh release create` and `twine upload` are given.
const FOLDER: &str = "to-publish";
const SUMS: &str = "SHA256SUMS";

/// Copies a file that was made and checked into the release's folder in place of `former` ones, which end alike, and
/// writes the checksums of all files there.
pub(crate) fn add(file: &Path) -> Result<()> {
    let folder = target_folder(FOLDER)?;
    let name = replace_former(file, &folder)?;
    let sums = checksums(&folder)?;
    fs::write(folder.join(SUMS), &sums).with_context(|| format!("writing {SUMS} in {}", folder.display()))?;
    workspace::run_in(&folder, "sha256sum", &["--check", "--quiet", "--strict", SUMS])?;
    println!("release: {} holds {name} and {SUMS} over {} files", folder.display(), sums.lines().count());
    Ok(())
}

/// Copies `file` into `folder`, from which files with the same ending go first: a release has one archive and one
/// wheel. Returns the file's name.
fn replace_former(file: &Path, folder: &Path) -> Result<String> {
    let name = file.file_name().and_then(|name| name.to_str()).context("a release's file has a name in UTF-8")?;
    let ending = file.extension();
    for former in entries(folder)?.into_iter().filter(|former| former.extension() == ending) {
        fs::remove_file(&former).with_context(|| format!("removing {}", former.display()))?;
    }
    fs::copy(file, folder.join(name)).with_context(|| format!("copying {} to {}", file.display(), folder.display()))?;
    Ok(name.to_owned())
}

/// A line `SUM  NAME` for each file of a folder but the checksums themselves, in the order of their names.
fn checksums(folder: &Path) -> Result<String> {
    let mut files: Vec<PathBuf> = entries(folder)?;
    files.retain(|file| file.is_file() && file.file_name().is_some_and(|name| name != SUMS));
    files.sort();
    let names: Vec<_> = files.iter().filter_map(|file| file.file_name()).collect();
    let output = Command::new("sha256sum").args(&names).current_dir(folder).output();
    let output = output.context("cannot start sha256sum, of Debian's coreutils")?;
    ensure!(output.status.success(), "sha256sum failed: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).context("sha256sum printed text that is not UTF-8")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_holds_the_newest_file_of_each_kind_and_its_sum() {
        let [made, folder] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
        for (name, text) in [("a-0.1.0.tar.gz", "one"), ("b-0.1.0.whl", "two"), ("a-0.2.0.tar.gz", "three")] {
            let file = made.path().join(name);
            fs::write(&file, text).expect("written");
            assert_eq!(replace_former(&file, folder.path()).expect("copied"), name);
        }
        fs::write(folder.path().join(SUMS), "former sums").expect("written");
        let sums = checksums(folder.path()).expect("made");
        // echo -n three | sha256sum; echo -n two | sha256sum
        assert_eq!(
            sums,
            "8b5b9db0c13db24256c829aa364aa90c6d2eba318b9232a4ab9313b954d3555f  a-0.2.0.tar.gz\n\
             3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3  b-0.1.0.whl\n"
        );
    }
}
