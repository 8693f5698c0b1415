//! A node, its pods and a cloud network out of namespaces in one machine; processes under test; witnesses.
