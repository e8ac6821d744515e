//! `sieve completions` and `sieve man`: the command line for a shell and as manual pages.
use anyhow::{Context, Result};
use clap::{Args, Command};
use clap_complete::Shell;
use sieve_core::ShownPath;
use std::path::PathBuf;

use crate::terminal;

/// Arguments of `sieve completions`.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Arguments of `sieve man`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ManArgs {
    /// Folder for the pages, for example ~/.local/share/man/man1
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// Prints a shell's completion script.
pub(crate) fn completions(args: CompletionsArgs, mut command: Command) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "sieve", &mut script);
    terminal::text(&String::from_utf8(script)?);
    Ok(())
}

/// Writes one manual page for each command.
pub(crate) fn man(args: &ManArgs, command: Command) -> Result<()> {
    let writing = || format!("writing manual pages to {}", args.out.shown());
    std::fs::create_dir_all(&args.out).with_context(writing)?;
    clap_mangen::generate_to(command, &args.out).with_context(writing)?;
    terminal::line(&format!("wrote manual pages to {}", args.out.shown()));
    Ok(())
}
