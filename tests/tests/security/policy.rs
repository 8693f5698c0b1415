//! Tests the kata-agent's policy of a pod's initdata: it holds from the first request on, and a pod without it does not
//! start.

use peerpod_client::{Error, exec_request};
use peerpod_proto::agent::SetPolicyRequest;
use peerpod_tests::{CONTAINER, PATIENCE, Sandbox};
use peerpod_world::{Daemons, Settings, Sight, World, eventually};
use ttrpc::{Code, context};

/// Initdata whose `policy.rego` has these lines.
fn initdata(policy: &str) -> String {
    format!("algorithm = \"sha256\"\nversion = \"0.1.0\"\n[data]\n\"policy.rego\" = '''\n{policy}\n'''\n")
}

async fn boot(daemons: &Daemons, world: &World, policy: &str) -> anyhow::Result<Sandbox> {
    let policy = initdata(policy);
    let pod = world.pod().unwrap();
    Sandbox::boot(daemons, pod, "policy", |all| all.hypervisor("cc_init_data", &policy), PATIENCE).await
}

fn assert_denied(error: &Error) {
    assert_eq!(error.code(), Some(Code::PERMISSION_DENIED), "{error}");
    assert!(error.to_string().contains("blocked by policy"), "{error}");
}

#[tokio::test]
async fn a_policy_that_denies_exec_denies_exec() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let policy =
        "package agent_policy\ndefault ExecProcessRequest := false\ndefault SetPolicyRequest := false";
    let sandbox = boot(&daemons, &world, policy).await.unwrap();
    sandbox.create_container(CONTAINER, &["sleep", "infinity"]).await.unwrap();
    let exec = exec_request(CONTAINER, "denied", &["/bin/sh", "-c", "echo open"]);
    assert_denied(&sandbox.agent.exec_process(&exec).await.unwrap_err());
    // Nor does a shim get another policy.
    let open = SetPolicyRequest { policy: "package agent_policy".to_owned(), ..SetPolicyRequest::default() };
    let error =
        sandbox.agent.service().set_policy(context::with_duration(PATIENCE), &open).await.unwrap_err();
    assert!(error.to_string().contains("blocked by policy"), "{error}");
    // The next run of the guest program finds the policy in place.
    let sight = Sight::of(&world, &[], &daemons).unwrap();
    assert_eq!(sight.kill("peerpod-guest", "serve").unwrap(), 1, "{sight}");
    eventually("the node hears of it", PATIENCE, async || {
        let log = std::fs::read_to_string(daemons.log("node")).ok()?;
        log.contains("the guest rejoined").then_some(())
    })
    .await
    .unwrap();
    assert_denied(&sandbox.agent.exec_process(&exec).await.unwrap_err());
    sandbox.agent.signal_process(CONTAINER, "", 9).await.unwrap();
    assert_eq!(sandbox.agent.wait_process(CONTAINER, "").await.unwrap(), 137);
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test]
async fn a_pod_whose_policy_the_agent_does_not_take_is_refused() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let error = boot(&daemons, &world, "no policy").await.err().expect("the pod does not start");
    let text = format!("{error:#}");
    assert!(text.contains("policy.rego") && text.contains("agent_policy"), "{text}");
}
