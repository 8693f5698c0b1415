//! Checks the rights of an installation, or of a node's daemon, by reviews of the API server.

use futures_util::future::join_all;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec, SubjectAccessReview,
    SubjectAccessReviewSpec,
};
use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::api::PostParams;
use kube::{Api, Client};
use peerpod_kube::client::{Error, within};

use crate::check::Account;
use crate::check::config::Config;
use crate::item::{Outcome, failed};

/// Rights of a node's daemon in the cluster and in its own namespace, as the chart gives them.
const NODE_RIGHTS: [&str; 2] = [
    include_str!("../../../../../deploy/chart/files/rbac/node.yaml"),
    include_str!("../../../../../deploy/chart/files/rbac/node-own.yaml"),
];
/// Group and resource of the objects that an installation makes.
const INSTALLED: [(&str, &str); 9] = [
    ("", "namespaces"),
    ("", "serviceaccounts"),
    ("apiextensions.k8s.io", "customresourcedefinitions"),
    ("apps", "daemonsets"),
    ("apps", "deployments"),
    ("node.k8s.io", "runtimeclasses"),
    ("rbac.authorization.k8s.io", "clusterroles"),
    ("admissionregistration.k8s.io", "mutatingwebhookconfigurations"),
    ("admissionregistration.k8s.io", "validatingadmissionpolicies"),
];

/// Asks for each right of an installation, or of a node's daemon.
pub(super) async fn check(client: &Client, config: &Config, pre: bool, account: Option<&Account>) -> Outcome {
    let namespace = Some(config.text("cluster.namespace")).filter(|name| !name.is_empty());
    let namespace = namespace.unwrap_or_else(|| client.default_namespace().to_owned());
    let asked: Vec<ResourceAttributes> = if pre {
        let right = |(group, resource): (&str, &str)| attributes(group, resource, "create", None, None);
        INSTALLED.into_iter().map(right).collect()
    } else {
        let [all, own] = NODE_RIGHTS.map(of_rules);
        let own =
            own.into_iter().map(|right| ResourceAttributes { namespace: Some(namespace.clone()), ..right });
        all.into_iter().chain(own).collect()
    };
    let answers = join_all(asked.iter().map(|right| is_allowed(client, right, account))).await;
    let mut missing = Vec::new();
    for (right, answer) in asked.iter().zip(answers) {
        match answer {
            Ok(true) => {}
            Ok(false) => missing.push(shown(right)),
            Err(why) => return failed(why.to_string(), "see the cause, and try again"),
        }
    }
    if missing.is_empty() {
        return Ok(format!("all {} rights are there", asked.len()));
    }
    let remedy = match pre {
        true => "install with an account that may make these, like one with the role cluster-admin",
        false => "give this account the rules in deploy/chart/files/rbac/node.yaml and node-own.yaml",
    };
    let account = account.map_or("this account".to_owned(), |Account { namespace, name }| {
        format!("account {namespace}/{name}")
    });
    failed(format!("{account} may not {}", missing.join(", ")), remedy)
}

/// Asks whether this program's account, or another one, has a right.
async fn is_allowed(
    client: &Client,
    right: &ResourceAttributes,
    account: Option<&Account>,
) -> Result<bool, Error> {
    let (resource_attributes, params) = (Some(right.clone()), PostParams::default());
    let Some(Account { namespace, name }) = account else {
        let spec = SelfSubjectAccessReviewSpec { resource_attributes, ..Default::default() };
        let review = SelfSubjectAccessReview { spec, ..Default::default() };
        let reviews = Api::<SelfSubjectAccessReview>::all(client.clone());
        let answer = within("ask for a right", reviews.create(&params, &review)).await?;
        return Ok(answer.status.is_some_and(|status| status.allowed));
    };
    let groups = ["system:serviceaccounts", "system:authenticated"].map(str::to_owned);
    let groups = [&groups[..], &[format!("system:serviceaccounts:{namespace}")]].concat();
    let user = Some(format!("system:serviceaccount:{namespace}:{name}"));
    let spec =
        SubjectAccessReviewSpec { resource_attributes, user, groups: Some(groups), ..Default::default() };
    let review = SubjectAccessReview { spec, ..Default::default() };
    let reviews = Api::<SubjectAccessReview>::all(client.clone());
    let answer = within("ask for a right of another account", reviews.create(&params, &review)).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

fn attributes(
    group: &str,
    resource: &str,
    verb: &str,
    subresource: Option<&str>,
    name: Option<String>,
) -> ResourceAttributes {
    ResourceAttributes {
        group: Some(group.to_owned()),
        resource: Some(resource.to_owned()),
        subresource: subresource.map(str::to_owned),
        verb: Some(verb.to_owned()),
        name,
        ..ResourceAttributes::default()
    }
}

fn shown(right: &ResourceAttributes) -> String {
    let part = |text: &Option<String>| text.clone().unwrap_or_default();
    let below = right.subresource.as_ref().map(|part| format!("/{part}")).unwrap_or_default();
    format!("{} {}{below}", part(&right.verb), part(&right.resource))
}

/// Returns the single rights of the chart's rules.
fn of_rules(text: &str) -> Vec<ResourceAttributes> {
    let rules: Vec<PolicyRule> = serde_yaml::from_str(text).unwrap_or_default();
    let mut rights = Vec::new();
    for rule in &rules {
        for group in rule.api_groups.iter().flatten() {
            for resource in rule.resources.iter().flatten() {
                let (resource, below) =
                    resource.split_once('/').map_or((resource.as_str(), None), |(r, s)| (r, Some(s)));
                let name = rule.resource_names.as_ref().and_then(|names| names.first().cloned());
                rights.extend(
                    rule.verbs.iter().map(|verb| attributes(group, resource, verb, below, name.clone())),
                );
            }
        }
    }
    rights
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_of_the_chart_becomes_single_rights() {
        let [all, own] = NODE_RIGHTS.map(of_rules);
        let all: Vec<String> = all.iter().map(shown).collect();
        for right in ["patch nodes/status", "create events", "delete peerpods", "get namespaces"] {
            assert!(all.contains(&right.to_owned()), "{right} in {all:?}");
        }
        assert_eq!(own.len(), 3);
    }
}
