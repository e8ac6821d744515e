//! The interface from C: a program that plans an op, asks for errors and frees the plan. Needs no GPU.
#![allow(clippy::disallowed_methods, reason = "paths of tests")]
use std::path::Path;
use std::process::Command;

#[test]
fn a_c_program_makes_a_plan() {
    let built = std::env::current_exe().expect("a path");
    let Some(library) = built.ancestors().map(|folder| folder.join("libsieve_capi.so")).find(|path| path.is_file())
    else {
        panic!("libsieve_capi.so is not above {}", built.display());
    };
    let folder = library.parent().expect("a folder");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("from_c");
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut compile = Command::new("cc");
    compile.args(["-std=c99", "-Wall", "-Werror", "-I"]).arg(own.join("include"));
    compile.args([&own.join("tests/from_c.c"), &library]).arg("-o").arg(&program);
    let compiled = compile.output().expect("cc, which Rust links with");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let done = Command::new(&program).env("LD_LIBRARY_PATH", folder).output().expect("the program");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
}
