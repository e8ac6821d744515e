//! `sieve completions` and `sieve man`: the command line for a shell and as manual pages.
use anyhow::{Context, Result};
use clap::{Args, Command};
use clap_complete::Shell;
use sieve_core::ShownPath;
use sieve_host::out_file::on_this_machine;
use std::path::PathBuf;

use crate::completion::script;
use sieve_host::terminal;

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
    #[arg(long, value_name = "DIR", value_parser = on_this_machine())]
    out: PathBuf,
}

/// Prints a shell's completion script, which asks this program for what it completes.
pub(crate) fn completions(args: CompletionsArgs) -> Result<()> {
    let program = std::env::current_exe().context("finding this program")?;
    terminal::text(&String::from_utf8(script(args.shell, &program.to_string_lossy())?)?);
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

#[cfg(test)]
mod tests {
    use crate::Cli;
    use clap::{Command, CommandFactory, Parser};

    /// The example of each command without subcommands, and the command's name behind `sieve`.
    fn examples(command: &Command, name: &str, found: &mut Vec<(String, Option<String>)>) {
        let mut inner = command.get_subcommands().filter(|inner| inner.get_name() != "help").peekable();
        if inner.peek().is_none() {
            let help = command.get_after_help().map(ToString::to_string);
            found.push((name.to_owned(), help));
            return;
        }
        for inner in inner {
            examples(inner, &format!("{name} {}", inner.get_name()), found);
        }
    }

    /// The words of a command line, of which some are in single quotes.
    fn words(line: &str) -> Vec<String> {
        let parts = line.split('\'').enumerate();
        let words = parts.flat_map(|(index, part)| match index % 2 {
            0 => part.split_whitespace().map(str::to_owned).collect(),
            _ => vec![part.to_owned()],
        });
        words.collect()
    }

    #[test]
    fn every_command_has_an_example_that_the_command_line_takes() {
        let mut found = Vec::new();
        examples(&Cli::command(), "sieve", &mut found);
        assert!(found.len() > 30, "{} commands", found.len());
        for (name, help) in found {
            let help = help.unwrap_or_default();
            let line = help.strip_prefix("Example: ").unwrap_or_else(|| panic!("{name} --help has no example: {help}"));
            assert!(line.starts_with(&name), "{name} has the example of another command: {line}");
            if let Err(error) = Cli::try_parse_from(words(line)) {
                panic!("{line}\n{error}");
            }
        }
    }
}
