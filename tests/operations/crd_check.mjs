// Checks custom resources, a JSON list on standard input, against the schemas of their operators.
// Prints a line for each that is refused, or that no schema is known of, and then exits with 1.
import {readFileSync} from 'node:fs';
import {ServiceMonitor, PrometheusRule} from '@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1';
import {ScaledObject} from '@kubernetes-models/keda/keda.sh/v1alpha1';
import {Certificate} from '@kubernetes-models/cert-manager/cert-manager.io/v1';
import {HTTPRoute} from '@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1';

const kinds = {
  'monitoring.coreos.com/v1/ServiceMonitor': ServiceMonitor,
  'monitoring.coreos.com/v1/PrometheusRule': PrometheusRule,
  'keda.sh/v1alpha1/ScaledObject': ScaledObject,
  'cert-manager.io/v1/Certificate': Certificate,
  'gateway.networking.k8s.io/v1/HTTPRoute': HTTPRoute,
};

let refused = 0;
for (const object of JSON.parse(readFileSync(0, 'utf8'))) {
  const kind = `${object.apiVersion}/${object.kind}`;
  try {
    if (!kinds[kind]) throw new Error('no schema');
    new kinds[kind](object).validate();
  } catch (error) {
    refused += 1;
    console.log(`${kind} ${object.metadata?.name}: ${error.message}`);
  }
}
process.exit(refused > 0 ? 1 : 0);
