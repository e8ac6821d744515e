//! `cargo xtask wheel`: builds the Python package as one wheel, for every Python 3 on Linux with glibc 2.28 or newer.
use crate::release;
use crate::workspace::{self, entries, root, target_folder};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};

/// The oldest glibc with which the wheel works, and the tag that says so.
const GLIBC: (u32, u32) = (2, 28);
const TAG: &str = "manylinux_2_28_x86_64";
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Packages from PyPI: a linker for an old glibc, and what builds and tags wheels.
const TOOLS: &[&str] = &["cargo-zigbuild==0.24.0", "ziglang==0.15.2", "setuptools>=77", "wheel>=0.45"];

const MOST_BYTES: u64 = 6_000_000;

/// Builds the wheel, loads its library in an empty virtual environment, and adds it to the release.
pub(crate) fn run() -> Result<()> {
    let venv = target_folder("wheel-venv")?;
    let bin = |venv: &Path, program: &str| venv.join("bin").join(program).display().to_string();
    if !venv.join("bin/cargo-zigbuild").is_file() {
        workspace::run("python3", &["-m", "venv", &venv.display().to_string()])?;
        workspace::run(&bin(&venv, "python"), &[&["-m", "pip", "install", "-q"], TOOLS].concat())?;
    }
    let (major, minor) = GLIBC;
    let target = format!("{TARGET}.{major}.{minor}");
    // cargo-zigbuild runs zig as a module of this Python.
    let python = format!("CARGO_ZIGBUILD_PYTHON_PATH={}", bin(&venv, "python"));
    let zigbuild = bin(&venv, "cargo-zigbuild");
    let build = "zigbuild --release -p sieve-capi --lib --target".split(' ');
    let build = [python.as_str(), &zigbuild].into_iter().chain(build).chain([target.as_str()]);
    workspace::run("env", &build.collect::<Vec<_>>())?;

    let package = target_folder("wheel/package")?;
    copy_package(&root().join("python"), &package)?;
    let library = package.join("sieve_attention/libsieve_capi.so");
    let built = target_folder(TARGET)?.join("release/libsieve_capi.so");
    fs::copy(&built, &library).with_context(|| format!("copying {}", built.display()))?;
    workspace::run("strip", &["--strip-unneeded", &library.display().to_string()])?;
    let newest = newest_glibc(&fs::read(&library)?);
    ensure!(newest <= GLIBC, "the library needs glibc {newest:?}, the wheel's tag promises {GLIBC:?}");

    let wheels = target_folder("wheel/made")?;
    for old in entries(&wheels)? {
        fs::remove_file(old)?;
    }
    let [package, made] = [&package, &wheels].map(|path| path.display().to_string());
    let python = bin(&venv, "python");
    let make = "-m pip wheel -q --no-deps --no-build-isolation -w".split(' ');
    workspace::run(&python, &make.chain([made.as_str(), &package]).collect::<Vec<_>>())?;
    let plain = the_only(&wheels)?;
    let tags = ["--python-tag", "py3", "--abi-tag", "none", "--platform-tag", TAG];
    let plain = plain.display().to_string();
    let tag = [&["-m", "wheel", "tags", "--remove"], &tags[..], &[plain.as_str()]].concat();
    workspace::run(&python, &tag)?;
    let wheel = the_only(&wheels)?;
    let size = wheel.metadata()?.len();
    println!("wheel: {}, {:.2} MB, needs glibc {}.{}", wheel.display(), size as f64 / 1e6, newest.0, newest.1);
    ensure!(size <= MOST_BYTES, "the wheel has {size} bytes, more than {MOST_BYTES}");
    check_in_empty_environment(&wheel, bin)?;
    release::add(&wheel)
}

/// Installs the wheel without torch. The library must load, and the import must say that torch is missing.
fn check_in_empty_environment(wheel: &Path, bin: impl Fn(&Path, &str) -> String) -> Result<()> {
    let empty = target_folder("wheel")?.join("empty");
    workspace::run("python3", &["-m", "venv", "--clear", &empty.display().to_string()])?;
    let python = bin(&empty, "python");
    let wheel = wheel.display().to_string();
    let install = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", &wheel];
    workspace::run(&python, &install)?;
    let library = "import ctypes, pathlib, sysconfig\n\
        path = pathlib.Path(sysconfig.get_paths()['purelib']) / 'sieve_attention/libsieve_capi.so'\n\
        assert ctypes.CDLL(str(path)).sieve_abi() == 2\n\
        try:\n    import sieve_attention\n\
        except ImportError as error:\n    assert 'pip install torch' in str(error), error\n\
        else:\n    raise SystemExit('there is a torch in an empty environment')";
    workspace::run(&python, &["-c", library])
}

/// The newest glibc version among the versioned symbols that a library imports.
fn newest_glibc(library: &[u8]) -> (u32, u32) {
    const NAME: &[u8] = b"GLIBC_";
    let found = library.windows(NAME.len()).enumerate().filter(|(_, word)| *word == NAME);
    let versions = found.filter_map(|(at, _)| {
        let rest = &library[at + NAME.len()..];
        let end = rest.iter().position(|byte| *byte == 0)?;
        let mut numbers = std::str::from_utf8(&rest[..end]).ok()?.split('.');
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    });
    versions.max().unwrap_or_default()
}

/// Copies what setuptools reads: the module, its description and the licences.
fn copy_package(from: &Path, to: &Path) -> Result<()> {
    let module = to.join("sieve_attention");
    let _ = fs::remove_dir_all(to);
    fs::create_dir_all(&module)?;
    for path in entries(&from.join("sieve_attention"))? {
        if path.extension().is_some_and(|ending| ending == "py" || ending == "typed") {
            fs::copy(&path, module.join(path.file_name().unwrap_or_default()))?;
        }
    }
    fs::copy(from.join("pyproject.toml"), to.join("pyproject.toml"))?;
    fs::copy(root().join("docs/pytorch.md"), to.join("README.md"))?;
    for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
        fs::copy(root().join(licence), to.join(licence))?;
    }
    Ok(())
}

/// The path of the only file in a folder.
fn the_only(folder: &Path) -> Result<PathBuf> {
    let mut all = entries(folder)?;
    ensure!(all.len() == 1, "{} holds {} files, expected one", folder.display(), all.len());
    Ok(all.remove(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_glibc_are_compared_as_numbers() {
        let library = b"\0GLIBC_2.9\0xGLIBC_2.17\0GLIBC_2.2.5\0GLIBC_PRIVATE\0";
        assert_eq!(newest_glibc(library), (2, 17));
        assert_eq!(newest_glibc(b"none"), (0, 0));
    }
}
