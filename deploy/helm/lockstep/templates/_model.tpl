{{/* The claim that has the model, or nothing where it is an image. */}}
{{- define "lockstep.modelClaim" -}}
{{- .model.pvc | default (printf "%s-model" .prefix) }}
{{- end }}

{{- define "lockstep.modelVolume" -}}
{{- $cell := index . 1 -}}
- name: model
  {{- if $cell.model.image }}
  image:
    reference: {{ $cell.model.image }}
    pullPolicy: {{ (index . 0).Values.images.pullPolicy }}
  {{- else }}
  persistentVolumeClaim:
    claimName: {{ include "lockstep.modelClaim" $cell | quote }}
    readOnly: true
  {{- end }}
{{- if $cell.model.download.url }}
- name: fetch
  configMap: {name: {{ $cell.prefix }}-model}
{{- end }}
{{- end }}

{{/* A pod that starts before the download has ended waits for it: (list ROOT CELL). */}}
{{- define "lockstep.modelWait" -}}
{{- $cell := index . 1 }}
{{- if $cell.model.download.url }}
initContainers:
  - name: model
    {{- include "lockstep.container" (list (index . 0) $cell.tokenizer.image) | nindent 4 }}
    command: [python3, /fetch/fetch_model.py, --wait, --manifest=/fetch/manifest.json, {{ printf "--directory=%s" $cell.modelDir }}]
    resources:
      requests: {cpu: 100m, memory: 128Mi}
      limits: {cpu: 100m, memory: 128Mi}
    volumeMounts:
      - {name: model, mountPath: /models, readOnly: true}
      - {name: fetch, mountPath: /fetch, readOnly: true}
{{- end }}
{{- end }}
