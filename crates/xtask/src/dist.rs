//! `cargo xtask dist`: makes an archive of the program, and checks that it runs without Rust and this machine's tools.
use crate::release;
use crate::workspace::{self, entries, root, target_folder};
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Files of the repository that are copied unchanged.
const FILES: [&str; 4] = ["README.md", "LICENSE-APACHE", "LICENSE-MIT", "CHANGELOG.md"];

/// Builds the archive, unpacks it into an empty folder, runs it there with nothing in PATH, and adds it to the release.
pub(crate) fn run() -> Result<()> {
    workspace::cargo("build --release --bin sieve")?;
    let version = env!("CARGO_PKG_VERSION");
    let name = format!("sieve-{version}-{}-linux", std::env::consts::ARCH);
    let dist = target_folder("dist")?;
    let folder = dist.join(&name);
    match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("removing {}", folder.display()));
        }
        _ => fs::create_dir_all(&folder)?,
    }
    let program = folder.join("sieve");
    copy(&target_folder("release")?.join("sieve"), &program)?;
    strip(&program)?;
    for file in FILES {
        copy(&root().join(file), &folder.join(file))?;
    }
    copy_all(&root().join("recipes"), &folder.join("recipes"))?;
    for docs in ["docs", "lab/docs"] {
        copy_all(&root().join(docs), &folder.join(docs))?;
    }
    let archive = dist.join(format!("{name}.tar.gz"));
    let [archive_path, dist_path] = [&archive, &dist].map(|path| path.display().to_string());
    workspace::run("tar", &["-czf", &archive_path, "-C", &dist_path, &name])?;
    println!(
        "dist: {archive_path}: {} packed, {} unpacked, of these the program {}",
        megabytes(size(&archive)?),
        megabytes(size(&folder)?),
        megabytes(size(&program)?)
    );
    check(&archive, &name, &dist.join("empty"))?;
    release::add(&archive)
}

/// Strips the program's symbols, or prints that `strip` is missing.
fn strip(program: &Path) -> Result<()> {
    match Command::new("strip").arg(program).status() {
        Ok(status) if !status.success() => bail!("strip failed ({status})"),
        Ok(_) => Ok(()),
        Err(_) => {
            println!("dist: there is no `strip` here; the program stays larger than it need be");
            Ok(())
        }
    }
}

/// Unpacks the archive into an empty folder, and runs there what a new user types, with an empty PATH and a HOME that
/// is the folder itself.
fn check(archive: &Path, name: &str, empty: &Path) -> Result<()> {
    let _ = fs::remove_dir_all(empty);
    fs::create_dir_all(empty)?;
    let [archive, into] = [archive, empty].map(|path| path.display().to_string());
    workspace::run("tar", &["-xzf", &archive, "-C", &into])?;
    let folder = empty.join(name);
    let text = "the cat sees the river and the dog follows seven stones\n".repeat(4000);
    fs::write(folder.join("text.txt"), text)?;
    for line in [
        "--version",
        "info",
        "recipe show",
        "plan --recipe dma_80m --set model.vocab_size=50304 --gpu h200",
        "recipe new --data text.txt --out mine.toml --set tokenizer.train.vocab_size=280",
        "train --recipe mine.toml --stop-after 3 --device cpu",
        "generate --checkpoint out/mine --prompt cat --max-new-tokens 8 --device cpu",
        "train --recipe quickstart.toml --stop-after 3 --device cpu",
    ] {
        let seconds = unaided(&folder, line)?.as_secs_f64();
        println!("dist: {seconds:>6.2} s  sieve {line}");
    }
    let mut starts = (0..7).map(|_| unaided(&folder, "--version")).collect::<Result<Vec<_>>>()?;
    starts.sort();
    println!("dist: starts in {:.1} ms (median of 7)", 1e3 * starts[3].as_secs_f64());
    fs::remove_dir_all(empty).with_context(|| format!("removing {}", empty.display()))
}

/// Runs the unpacked program with the arguments of `line` and an otherwise empty environment; returns the time it took.
fn unaided(folder: &Path, line: &str) -> Result<Duration> {
    let started = Instant::now();
    let output = Command::new(folder.join("sieve"))
        .args(line.split_whitespace())
        .current_dir(folder)
        .env_clear()
        .env("PATH", "")
        .env("HOME", folder)
        .output()
        .with_context(|| format!("starting sieve {line}"))?;
    let elapsed = started.elapsed();
    ensure!(
        output.status.success(),
        "sieve {line} failed in an empty folder ({})\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(elapsed)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("copying {} to {}", from.display(), to.display()))?;
    Ok(())
}

/// Copies the files that lie directly in a folder.
fn copy_all(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for path in entries(from)? {
        if let (true, Some(name)) = (path.is_file(), path.file_name()) {
            copy(&path, &to.join(name))?;
        }
    }
    Ok(())
}

/// Bytes of a file, or of all files below a folder.
fn size(path: &Path) -> Result<u64> {
    if path.is_file() {
        return Ok(path.metadata()?.len());
    }
    let sizes = entries(path)?.into_iter().map(|path| size(&path));
    sizes.sum()
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}
