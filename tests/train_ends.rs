//! How a run ends before its last step, and how it is made longer.
use crate::tiny_run::{STEPS, TinyRun, succeed};
use sieve_testing::says;

#[test]
fn a_few_more_steps_end_at_the_rate_of_the_end_before() {
    let tiny = TinyRun::dma();
    tiny.trained("run", "--set lr_scheduler.warmup_steps=20");
    let mut done = STEPS;
    // A tenth, a fifth and all of the steps so far; the warm-up of the recipe alone is longer than the first two.
    for more in [4, 9, 53] {
        let all = done + more;
        succeed(&mut tiny.train(
            "run",
            &format!("--resume --set lr_scheduler.warmup_steps=20 --extend {all}"),
        ));
        let rates = tiny.metrics("run", "step").into_values();
        let rates = rates
            .map(|line| line["lr"].as_f64().expect("a rate"))
            .collect::<Vec<_>>();
        let [end, new_end] = [done, all].map(|step| rates[step as usize - 1]);
        // Ten steps of decay ended at a tenth of the highest rate.
        assert!(new_end <= end + 1e-9 && end < 1.01e-3, "{more} more steps: {rates:?}");
        let new = &rates[done as usize..];
        let highest = new.iter().copied().fold(0.0, f64::max);
        assert!((highest - 1e-2).abs() < 1e-9, "{more} more steps: {new:?}");
        done = all;
    }
    // The same command as a branch says what a branch can do.
    let branch = format!("--branch-from run/checkpoint/step-{done} --set training.steps={done}");
    let printed = succeed(&mut tiny.train("branch", &branch));
    says(
        &printed,
        &format!("nothing to do | --branch-from with --set training.steps={}", 2 * done),
    );
    assert!(!printed.contains("--extend"), "{printed}");
}
